"""Find the normalised groups of a network: propose by structure, screen by one derivative, confirm by rescaling.

A group g is normalised when f(k θ_g) = f(θ_g) for every k > 0 and every input. Then J_g θ_g = 0 (Euler), which one
backward pass checks for all candidates at once; those that pass are rescaled and run, in float64 where the model can.
Everything is looked at twice: with the trained weights and given inputs, and with weights and inputs moved at random,
so that dead units and zero initialisations prove nothing.
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
from lapwing.priors.normalised.calls import NormCall, sharpened
from lapwing.priors.normalised.groups import GroupEvidence, Kind, NormalisedGroup
from lapwing.priors.normalised.point import (
    Names,
    Point,
    in_double,
    moved_point,
    point_at,
    tracked_modules,
)
from lapwing.priors.normalised.survey import Euler, Survey, euler_products, surveyed

_ROWS = 8  # enough for statistics of a batch, few enough to be quick
_RTOL = 1e-3  # of the outputs, or of what moving the group could change of them
_ALIVE = 1e-9  # a group whose derivative is less than this part of the outputs cannot be judged
_TOGETHER = 32  # candidates in one trial


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
    return anatomy(Network.tried(model, given)[0], chosen, given).groups


def anatomy(network: Network, layout: ParamLayout, x: ModelInput) -> Anatomy:
    few = x.rows(torch.arange(_ROWS).clamp(max=x.n - 1))
    with network.borrowed() as own:
        path = tracked_modules(own.model)
        trained = point_at(in_double(own, few), few, path)
        moved = moved_point(trained)
        survey = surveyed(moved)
        groups = tuple(_Finder(trained, moved, survey, euler_products(trained, sharpened), layout).groups())
    claimed = {name for group in groups for name in group.names}
    free = [name for name in layout.names if name not in claimed]
    return Anatomy(groups, tuple(n for n in free if n in survey.scales), tuple(n for n in free if n in survey.shifts))


class _Finder:
    """Layers first, then single tensors, then what writes a stream together; nothing is claimed twice."""

    def __init__(self, trained: Point, moved: Point, survey: Survey, euler: Euler, layout: ParamLayout) -> None:
        self.trained, self.moved, self.survey, self.euler, self.layout = trained, moved, survey, euler, layout
        self.found: dict[Names, NormalisedGroup] = {}
        self.tried: set[Names] = set()

    def groups(self) -> list[NormalisedGroup]:
        affine = self.survey.scales | self.survey.shifts
        modules = self.layout.modules.values()
        layers = [tuple(name for name in names if name not in affine) for names in modules]
        self._look_at(layers)
        self._look_at([(name,) for layer in layers if layer not in self.found for name in layer])
        for writers in self.survey.joint:
            # What is claimed absorbs its scale alone, so the others are invariant without it.
            claimed = {name for names in self.found for name in names}
            self._look_at([tuple(name for name in self.layout.names if name in writers - claimed)])
        return sorted(self.found.values(), key=lambda group: self.layout[group.names[0]].start)

    def _look_at(self, candidates: Sequence[Names]) -> None:
        """Screen these disjoint candidates, and confirm what is left."""
        fresh = [names for names in candidates if names and names not in self.tried]
        self.tried |= set(fresh)
        euler = self.survey.euler
        likely = [n for n in fresh if euler.size(n) >= _ALIVE and euler.vanishes(n, 100 * self.moved.tolerance)]
        for start in range(0, len(likely), _TOGETHER):
            self._confirm(likely[start : start + _TOGETHER])

    def _confirm(self, candidates: Sequence[Names]) -> None:
        """Multiply all of them at once, each by a factor of its own; when the outputs change, halve the suspects."""
        trial = _Trial(candidates)
        if self._passes(trial):
            for names in candidates:
                self._claim(trial, names)
        elif len(candidates) > 1:
            half = len(candidates) // 2
            self._confirm(candidates[:half])
            self._confirm(candidates[half:])

    def _passes(self, trial: _Trial) -> bool:
        weakest = min(self.survey.euler.size(names) for names in trial.candidates)
        places = ((self.moved, _RTOL * min(1.0, weakest)), (self.trained, _RTOL))
        return all(trial.run(point, power) <= allowed for point, allowed in places for power in (-1, 1))

    def _claim(self, trial: _Trial, names: Names) -> None:
        kind: Kind = "statistical" if trial.moves_statistics(names) else "exact"
        e_jacobian = self.euler.norm(names)
        if kind == "exact" and e_jacobian > _RTOL:
            return
        model = self.trained.network.model
        layers = tuple(f"{p or 'the model'} ({type(model.get_submodule(p)).__name__})" for p in trial.paths(names))
        e_half, e_double = trial.errors[-2:]
        self.found[names] = NormalisedGroup(names, kind, GroupEvidence(e_half, e_double, e_jacobian, layers))


class _Trial:
    """Groups multiplied by about 2, and by about ½, each by a factor that tells whose scale a norm has followed."""

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
        """The modules whose norms followed, in the order they were called."""
        return tuple(dict.fromkeys(call.path for call in self.followers[names]))
