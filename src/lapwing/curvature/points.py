"""Some of the data, chosen in one pass over all of them: at random, or where the likelihood bends most."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.errors import InputError
from lapwing.likelihoods import Gaussian

if TYPE_CHECKING:
    from lapwing.curvature.estimate import Pass

Source = Callable[[], Iterable[tuple[ModelInput, Tensor]]]


@dataclass(frozen=True, eq=False)
class Points:
    """The chosen data, in batches, and how many there were to choose from."""

    batches: tuple[tuple[ModelInput, Tensor], ...]
    n_seen: int

    @property
    def n(self) -> int:
        return sum(x.n for x, _ in self.batches)


class Criterion(ABC):
    """Which data are taken: those with the smallest keys."""

    @abstractmethod
    def keys(self, sweep: Pass, x: ModelInput, y: Tensor) -> Float[Tensor, " n"]: ...


@dataclass(frozen=True)
class AtRandom(Criterion):
    """Uniformly, without replacement."""

    def keys(self, sweep: Pass, x: ModelInput, y: Tensor) -> Float[Tensor, " n"]:
        return torch.rand(x.n, dtype=torch.float64, generator=sweep.generator, device=sweep.generator.device).cpu()


@dataclass(frozen=True)
class MostInformative(Criterion):
    """Largest tr Λ: one forward pass over all data."""

    def keys(self, sweep: Pass, x: ModelInput, y: Tensor) -> Float[Tensor, " n"]:
        if isinstance(sweep.likelihood, Gaussian):
            raise InputError(
                'GP(points="informative") takes the data with the largest tr Λ, but under a Gaussian likelihood Λ is '
                'the same for all. Use points="random".'
            )
        f = sweep.sites.split(sweep.linearised.outputs(x).double())
        curvatures = sweep.likelihood.part_curvatures(f, y)
        return -sum((part.diagonals().sum((1, 2)) for part in curvatures), torch.zeros(())).double().cpu()


def choose_points(sweep: Pass, data: Source, n_points: int, criterion: Criterion) -> Points:
    """The n data with the smallest keys, kept by value: loaders may shuffle. All of them when there are no more."""
    kept: list[tuple[ModelInput, Tensor, Tensor]] = []
    n_seen = 0
    for x, y in data():
        n_seen += x.n
        kept.append((x, y, criterion.keys(sweep, x, y)))
        kept = _smallest(kept, n_points)
    return Points(tuple(_joined([(x, y) for x, y, _ in kept])), n_seen)


def _smallest(kept: list[tuple[ModelInput, Tensor, Tensor]], n_points: int) -> list[tuple[ModelInput, Tensor, Tensor]]:
    keys = torch.cat([k for *_, k in kept])
    if len(keys) <= n_points:
        return kept
    taken = torch.zeros(len(keys), dtype=torch.bool)
    taken[keys.argsort(stable=True)[:n_points]] = True
    parts = zip(kept, taken.split([len(k) for *_, k in kept]), strict=True)
    return [(x.rows(at.nonzero()[:, 0]), y[at.to(y.device)], k[at]) for (x, y, k), at in parts if bool(at.any())]


def _joined(batches: list[tuple[ModelInput, Tensor]]) -> list[tuple[ModelInput, Tensor]]:
    """One batch, where all inputs have one shape; what is not batched goes with its own data."""
    first = batches[0][0]
    shapes = [[_trailing(x, v) for _, v in x.leaves()] for x, _ in batches]
    if any(s != shapes[0] or None in s for s in shapes):
        return batches
    args = tuple(torch.cat(column) for column in zip(*(x.args for x, _ in batches), strict=True))
    kwargs = {key: torch.cat([x.kwargs[key] for x, _ in batches]) for key in first.kwargs}
    return [(ModelInput(args, kwargs, sum(x.n for x, _ in batches)), torch.cat([y for _, y in batches]))]


def _trailing(x: ModelInput, value: object) -> tuple[object, ...] | None:
    return (value.dtype, *value.shape[1:]) if isinstance(value, Tensor) and x.batched(value) else None
