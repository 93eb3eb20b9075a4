"""Select the weights of a subnetwork by score, and build their layout and prior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.errors import InputError, InputTypeError
from lapwing.network.parameters import ParamLayout
from lapwing.network.rule_check import LayoutChoice
from lapwing.priors import GaussianPrior
from lapwing.subnetwork.candidates import Candidates
from lapwing.subnetwork.scaling import PriorScaling
from lapwing.subnetwork.scores import Magnitude, Score


@dataclass(frozen=True, eq=False)
class Selector:
    """A subnetwork as objects: the eligible tensors, and either a score and a number of weights, or indices."""

    eligible: LayoutChoice
    score: Score
    k: int | None  # None: all eligible weights
    scaling: PriorScaling
    indices: Any = None

    def check(self, layout: ParamLayout) -> None:
        """Raise before any work if the selection is impossible for this layout."""
        if self.indices is not None:
            explicit_indices(self.indices, layout.p)
        if self.k is not None and self.k > layout.p:
            raise InputError(
                f"Subnetwork: k={self.k} weights were asked for, but only {layout.p} are eligible. Take fewer; "
                'params="all" infers every weight.'
            )

    def without_data(self, layout: ParamLayout, theta: Float[Tensor, " p"]) -> ParamLayout:
        """A layout of the right size, selected by magnitude without a pass over the data: for memory planning."""
        if self.indices is not None:
            return layout.selected(explicit_indices(self.indices, layout.p))
        return layout.selected(ranked(theta.abs(), None)[: self.k].sort().values.cpu(), Magnitude.words)

    def selected(self, candidates: Candidates) -> tuple[ParamLayout, GaussianPrior]:
        """The layout of the selected weights, and their prior."""
        indices, words = self._chosen(candidates)
        layout = candidates.layout.selected(indices.cpu(), words)
        factor = self.scaling.factor(candidates, indices)
        if factor != 1:
            layout = replace(layout, selected_by=f"{words}; prior precisions times {factor:.3g}")
        prior = candidates.prior.restricted(layout)
        return layout, prior.with_precisions(prior.precisions * factor)

    def _chosen(self, candidates: Candidates) -> tuple[Int[Tensor, " k"], str]:
        p = candidates.layout.p
        if self.indices is not None:
            indices = explicit_indices(self.indices, p)
            return indices, f"{len(indices):,} of {p:,} weights, by hand"
        k = p if self.k is None else self.k
        dead = self.score.dead(candidates)
        # Sorted by position, as layouts require; the rank itself is not needed any more.
        chosen = ranked(self.score.of(candidates), dead)[:k].sort().values
        words = f"{k:,} of {p:,} weights with {self.score.words}"
        if dead is not None:
            words += f"; {int(dead.sum()):,} of {p:,} have no curvature and are ranked last"
        return chosen, words


def ranked(scores: Float[Tensor, " p"], dead: Tensor | None) -> Int[Tensor, " p"]:
    """Indices of all weights, highest score first, dead ones last. Stable, so that ties are reproducible."""
    order = scores.sort(descending=True, stable=True).indices
    return order if dead is None else order[dead[order].long().sort(stable=True).indices]


def explicit_indices(indices: Any, p: int) -> Int[Tensor, " k"]:
    """Positions, or a mask over p weights, as sorted positions."""
    try:
        given = torch.as_tensor(indices).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(f"indices: expected whole numbers or a mask, got {type(indices).__name__}.") from None
    if given.ndim != 1:
        raise InputError(f"indices: expected a flat list of positions or a flat mask, got shape {tuple(given.shape)}.")
    if given.dtype == torch.bool:
        if len(given) != p:
            raise InputError(f"indices: the mask has {len(given)} entries, but the model has {p} trainable weights.")
        return given.nonzero()[:, 0]
    if len(given) and (given.is_floating_point() or given.is_complex()):
        raise InputTypeError(f"indices: expected whole numbers or a mask, got dtype {given.dtype}.")
    # unique() sorts, and shows duplicates by a smaller count.
    positions = given.long().unique()
    if len(positions) < len(given):
        raise InputError(f"indices: {len(given) - len(positions)} of the {len(given)} positions are named twice.")
    if len(positions) and (int(positions[0]) < 0 or int(positions[-1]) >= p):
        bad = int(positions[0]) if int(positions[0]) < 0 else int(positions[-1])
        raise InputError(f"indices: position {bad} is outside the {p} trainable weights, which count from 0.")
    return positions
