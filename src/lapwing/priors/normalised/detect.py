"""Detect the normalised groups of a network: candidates from the graph, screening by gradients, test by rescaling.

A group g is normalised if f(k θ_g) = f(θ_g) for every k > 0 and every input. Then J_g θ_g = 0 (Euler's theorem), which
is screened for all candidates with a few backward passes. Candidates that pass are rescaled and the network is run, in
float64 if the model supports it. Both tests use the trained weights and given inputs, and randomly perturbed weights
and inputs: dead units and zero-initialised weights would pass a test at the trained weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lapwing.data import ModelInput, as_input
from lapwing.network.module import Network
from lapwing.network.parameters import ParamLayout, trainable
from lapwing.priors.normalised.calls import NormCall, with_negligible_eps
from lapwing.priors.normalised.groups import GroupEvidence, Kind, NormalisedGroup
from lapwing.priors.normalised.point import (
    Names,
    Point,
    in_double,
    perturbed_point,
    point_at,
    tracked_modules,
)
from lapwing.priors.normalised.screening import EulerProducts, Screening, euler_products, screened

_ROWS = 8  # data: enough for batch statistics
_RTOL = 1e-3  # tolerance relative to the outputs, or to the largest possible effect of the group
_ALIVE = 1e-9  # a group with a smaller relative effect on the outputs cannot be tested
_AT_ONCE = 32  # candidates rescaled in one trial


@dataclass(frozen=True)
class NormStructure:
    """Normalised groups of a network, and the scales and shifts of its norms that are not in a group."""

    groups: tuple[NormalisedGroup, ...]
    scales: tuple[str, ...]
    shifts: tuple[str, ...]


def find_normalised_groups(
    model: nn.Module, x: Any, *, layout: ParamLayout | None = None
) -> tuple[NormalisedGroup, ...]:
    """The normalised groups among the trainable parameters of a model, or among the parameters of a layout.

    `x` is a batch of inputs: a tensor, a tuple or a mapping. Groups are disjoint, as small as possible (a layer, where
    a single layer is normalised), and in the order of the parameters. The model is not modified.
    """
    given = x if isinstance(x, ModelInput) else as_input(x)
    chosen = trainable(model) if layout is None else layout
    return norm_structure(Network.tried(model, given)[0], chosen, given).groups


def norm_structure(network: Network, layout: ParamLayout, x: ModelInput) -> NormStructure:
    few = x.rows(torch.arange(_ROWS).clamp(max=x.n - 1))
    with network.borrowed() as own:
        path = tracked_modules(own.model)
        trained = point_at(in_double(own, few), few, path)
        moved = perturbed_point(trained)
        screening = screened(moved, layout.names)
        euler = euler_products(trained, with_negligible_eps, layout.names)
        groups = tuple(_Finder(trained, moved, screening, euler, layout).groups())
    claimed = {name for group in groups for name in group.names}
    free = [name for name in layout.names if name not in claimed]
    return NormStructure(
        groups, tuple(n for n in free if n in screening.scales), tuple(n for n in free if n in screening.shifts)
    )


class _Finder:
    """Tests layers, then single tensors, then sets of tensors that write a stream jointly; groups are disjoint."""

    def __init__(
        self, trained: Point, moved: Point, screening: Screening, euler: EulerProducts, layout: ParamLayout
    ) -> None:
        self.trained, self.moved, self.screening, self.euler, self.layout = trained, moved, screening, euler, layout
        self.found: dict[Names, NormalisedGroup] = {}
        self.tried: set[Names] = set()

    def groups(self) -> list[NormalisedGroup]:
        affine = self.screening.scales | self.screening.shifts
        modules = self.layout.modules.values()
        layers = [tuple(name for name in names if name not in affine) for names in modules]
        self._look_at(layers)
        self._look_at([(name,) for layer in layers if layer not in self.found for name in layer])
        for writers in self.screening.joint:
            # Tensors already in a group absorb their scale alone, so the others form a group without them.
            claimed = {name for names in self.found for name in names}
            self._look_at([tuple(name for name in self.layout.names if name in writers - claimed)])
        return sorted(self.found.values(), key=lambda group: self.layout[group.names[0]].start)

    def _look_at(self, candidates: Sequence[Names]) -> None:
        """Screen disjoint candidates by gradients, and test the remaining ones by rescaling."""
        fresh = [names for names in candidates if names and names not in self.tried]
        self.tried |= set(fresh)
        euler = self.screening.euler
        likely = [n for n in fresh if euler.size(n) >= _ALIVE and euler.vanishes(n, 100 * self.moved.tolerance)]
        for start in range(0, len(likely), _AT_ONCE):
            self._confirm(likely[start : start + _AT_ONCE])

    def _confirm(self, candidates: Sequence[Names]) -> None:
        """Rescale all candidates at once, each by its own factor; if the outputs change, bisect."""
        trial = _Trial(candidates)
        if self._passes(trial):
            for names in candidates:
                self._claim(trial, names)
        elif len(candidates) > 1:
            half = len(candidates) // 2
            self._confirm(candidates[:half])
            self._confirm(candidates[half:])

    def _passes(self, trial: _Trial) -> bool:
        weakest = min(self.screening.euler.size(names) for names in trial.candidates)
        places = ((self.moved, _RTOL * min(1.0, weakest)), (self.trained, _RTOL))
        return all(trial.run(point, power) <= allowed for point, allowed in places for power in (-1, 1))

    def _claim(self, trial: _Trial, names: Names) -> None:
        kind: Kind = "statistical" if trial.moves_statistics(names) else "exact"
        e_jacobian = self.euler.norm(names)
        # For an exact group J_g θ_g = 0 must also hold at the trained weights in eval mode.
        if kind == "exact" and e_jacobian > _RTOL:
            return
        model = self.trained.network.model
        layers = tuple(f"{p or 'the model'} ({type(model.get_submodule(p)).__name__})" for p in trial.paths(names))
        e_half, e_double = trial.errors[-2:]
        self.found[names] = NormalisedGroup(names, kind, GroupEvidence(e_half, e_double, e_jacobian, layers))


class _Trial:
    """Rescales groups by about 2 and about ½. Factors differ slightly, to identify which group a norm has followed."""

    def __init__(self, candidates: Sequence[Names]) -> None:
        self.candidates = candidates
        self.factors = {names: 2 + 0.1 * (j + 1) / len(candidates) for j, names in enumerate(candidates)}
        self.errors: list[float] = []
        self.followers: dict[Names, list[NormCall]] = {names: [] for names in candidates}

    def run(self, point: Point, power: int) -> float:
        factors = {names: k**power for names, k in self.factors.items()}
        error, treated = point.change(factors)
        self.errors.append(error)
        for names, k in factors.items():
            self.followers[names] += treated.followers[k]
        return error

    def moves_statistics(self, names: Names) -> bool:
        return any(call.of_running_statistics for call in self.followers[names])

    def paths(self, names: Names) -> tuple[str, ...]:
        """Paths of the modules whose norms followed the group, in the order of the calls."""
        return tuple(dict.fromkeys(call.path for call in self.followers[names]))
