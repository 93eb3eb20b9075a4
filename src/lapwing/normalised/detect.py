"""Find the normalised groups of a network: propose by structure, screen by one derivative, confirm by rescaling.

A group g is normalised when f(k θ_g) = f(θ_g) for every k > 0 and every input. Then J_g θ_g = 0 (Euler), which one
backward pass checks for all candidates at once; those that pass are rescaled and run, in float64 where the model can.
Everything is looked at twice: with the trained weights and given inputs, and with weights and inputs moved at random,
so that dead units and zero initialisations prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lapwing.data import ModelInput, as_input
from lapwing.linearise import Network
from lapwing.normalised.calls import Rescaled, sharpened
from lapwing.normalised.groups import GroupEvidence, Kind, NormalisedGroup
from lapwing.normalised.point import Point, in_double, moved_point, point_at, tracked_modules
from lapwing.normalised.survey import Euler, Survey, euler_products, surveyed
from lapwing.params import ParamLayout, trainable
from lapwing.sandbox import borrowed

_ROWS = 8  # enough for statistics of a batch, few enough to be quick
_RTOL = 1e-3  # of the change that moving the group at random makes
_ALIVE = 1e-9  # a group whose derivative, or random move, is less than this part of the outputs cannot be judged


@dataclass(frozen=True)
class Anatomy:
    """The normalised groups of a network, and the scales and shifts of its norms that are in none of them."""

    groups: tuple[NormalisedGroup, ...]
    scales: tuple[str, ...]
    shifts: tuple[str, ...]


def find_normalised_groups(
    model: nn.Module, x: Any, *, layout: ParamLayout | None = None
) -> tuple[NormalisedGroup, ...]:
    """The normalised groups among the trainable parameters of a model, or among those of a layout.

    `x` is a batch of inputs: a tensor, a tuple or a mapping. Groups are disjoint, per layer where a layer alone is
    normalised, and in the order of the parameters. The model is borrowed and left as it was.
    """
    given = x if isinstance(x, ModelInput) else as_input(x)
    chosen = trainable(model) if layout is None else layout
    return anatomy(Network.of(model), chosen, given).groups


def anatomy(network: Network, layout: ParamLayout, x: ModelInput) -> Anatomy:
    few = x.rows(torch.arange(_ROWS) % x.n)
    with borrowed(network.model):
        path = tracked_modules(network.model)
        trained = point_at(in_double(network, few), few, path)
        moved = moved_point(trained)
        survey = surveyed(moved)
        finder = _Finder(trained, moved, survey, euler_products(trained, sharpened), layout)
        groups = tuple(sorted(finder.found(), key=lambda group: layout[group.names[0]].start))
    claimed = {name for group in groups for name in group.names}
    free = [name for name in layout.names if name not in claimed]
    return Anatomy(groups, tuple(n for n in free if n in survey.scales), tuple(n for n in free if n in survey.shifts))


class _Finder:
    """Layers first, then single tensors, then what writes a stream together; nothing is claimed twice."""

    def __init__(self, trained: Point, moved: Point, survey: Survey, euler: Euler, layout: ParamLayout) -> None:
        self.trained, self.moved, self.survey, self.euler, self.layout = trained, moved, survey, euler, layout
        self.claimed: set[str] = set()
        self.tried: set[frozenset[str]] = set()

    def found(self) -> Iterator[NormalisedGroup]:
        affine = self.survey.scales | self.survey.shifts
        for names in self.layout.modules.values():
            layer = tuple(name for name in names if name not in affine)
            whole = self._confirmed(layer)
            parts = [whole] if whole is not None else [self._confirmed((name,)) for name in layer]
            yield from (group for group in parts if group is not None)
        for writers in self.survey.joint:
            # A scale that one member absorbs alone can be taken out: the others are invariant without it.
            rest = tuple(name for name in self.layout.names if name in writers and name not in self.claimed)
            group = self._confirmed(rest)
            if group is not None:
                yield group

    def _confirmed(self, names: tuple[str, ...]) -> NormalisedGroup | None:
        if not names or frozenset(names) in self.tried:
            return None
        self.tried.add(frozenset(names))
        if not self.survey.euler.vanishes(names, 100 * self.moved.tolerance):
            return None
        group = self._measured(names)
        if group is not None:
            self.claimed |= set(names)
        return group

    def _measured(self, names: tuple[str, ...]) -> NormalisedGroup | None:
        alive = min(1.0, self.moved.jostled(names))
        if min(alive, self.survey.euler.size(names)) < _ALIVE:
            return None
        errors: list[float] = []
        treated: list[Rescaled] = []
        for point, allowed in ((self.moved, _RTOL * alive), (self.trained, _RTOL)):
            for k in (0.5, 2.0):
                error, treatment = point.rescaled(names, k)
                if not error <= allowed:
                    return None
                errors.append(error)
                treated.append(treatment)
        kind: Kind = "statistical" if any(t.moved_statistics for t in treated) else "exact"
        e_jacobian = self.euler.norm(names)
        if kind == "exact" and e_jacobian > _RTOL:
            return None
        return NormalisedGroup(names, kind, GroupEvidence(errors[2], errors[3], e_jacobian, self._absorbers(treated)))

    def _absorbers(self, treated: Sequence[Rescaled]) -> tuple[str, ...]:
        """The modules whose norms followed the scale, in the order they were called."""
        paths = dict.fromkeys(call.path for t in treated for call in t.absorbed)
        model = self.trained.network.model
        return tuple(f"{path or 'the model'} ({type(model.get_submodule(path)).__name__})" for path in paths)
