"""Select data points in one pass over the data: at random, or those with the largest curvature of the likelihood."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lapwing._types import Bool, Float, Tensor
from lapwing.curvature.passes import Pass, Source
from lapwing.data import ModelInput
from lapwing.errors import InputError
from lapwing.likelihoods import Gaussian
from lapwing.runtime import distributed


@dataclass(frozen=True, eq=False)
class Points:
    """The selected data: those of this rank, in batches. `n` and `n_seen` count selected and seen data of all ranks."""

    batches: tuple[tuple[ModelInput, Tensor], ...]
    n: int
    n_seen: int


Keys = Callable[[ModelInput, Tensor], Float[Tensor, " n"]]  # batch → sort keys


class Criterion(ABC):
    """Which data are selected: those with the smallest keys."""

    @abstractmethod
    def keys(self, sweep: Pass, data: Source) -> Keys:
        """A function that gives the keys of each batch, called once per batch in order."""


@dataclass(frozen=True)
class AtRandom(Criterion):
    """Uniformly, without replacement."""

    def keys(self, sweep: Pass, data: Source) -> Keys:
        generator = sweep.generator
        draw = partial(torch.rand, dtype=torch.float64, generator=generator, device=generator.device)
        if not distributed.is_distributed():
            return lambda x, y: draw(x.n).cpu()
        # One extra pass to count: the keys are then independent of how the data are split over ranks.
        numbers = distributed.gathered(sum(x.n for x, _ in data()))
        generator.set_state(distributed.broadcast(generator.get_state(), 0))
        return _DrawnKeys(draw(sum(numbers)).cpu().split(numbers)[distributed.rank()])


class _DrawnKeys:
    """Keys drawn in advance, handed out batch by batch."""

    def __init__(self, keys: Float[Tensor, " n"]) -> None:
        self.keys, self.at = keys, 0

    def __call__(self, x: ModelInput, y: Tensor) -> Float[Tensor, " n"]:
        self.at += x.n
        return self.keys[self.at - x.n : self.at]


@dataclass(frozen=True)
class MostInformative(Criterion):
    """Largest tr Λ, which takes one forward pass over all data."""

    def keys(self, sweep: Pass, data: Source) -> Keys:
        if isinstance(sweep.likelihood, Gaussian):
            raise InputError(
                'GP(points="informative") takes the data with the largest tr Λ, but under a Gaussian likelihood Λ is '
                'the same for all. Use points="random".'
            )
        return partial(self._keys, sweep)

    @staticmethod
    def _keys(sweep: Pass, x: ModelInput, y: Tensor) -> Float[Tensor, " n"]:
        f = sweep.sites.split(sweep.linearised.outputs(x).double())
        curvatures = sweep.likelihood.part_curvatures(f, y)
        return -sum((part.diagonals().sum((1, 2)) for part in curvatures), torch.zeros(())).double().cpu()


def choose_points(sweep: Pass, data: Source, n_points: int, criterion: Criterion) -> Points:
    """The `n_points` data with the smallest keys, or all if there are fewer.

    Inputs are stored, not their positions: a loader may shuffle. Only the best so far are in memory.
    """
    kept: list[tuple[ModelInput, Tensor, Tensor]] = []
    keys, n_seen = criterion.keys(sweep, data), 0
    for x, y in data():
        n_seen += x.n
        kept.append((x, y, keys(x, y)))
        # After every batch at most n_points data remain in memory.
        kept = _taken(kept, _smallest(_all_keys(kept), n_points))
    # Every rank has its own best; the best of all are among them.
    everyone = distributed.gathered(_all_keys(kept))
    taken = _smallest(torch.cat(everyone), n_points)
    kept = _taken(kept, taken.split([len(own) for own in everyone])[distributed.rank()])
    return Points(tuple(_joined([(x, y) for x, y, _ in kept])), int(taken.sum()), sum(distributed.gathered(n_seen)))


def _all_keys(kept: list[tuple[ModelInput, Tensor, Tensor]]) -> Float[Tensor, " n"]:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(k for *_, k in kept)])


def _smallest(keys: Float[Tensor, " n"], n_points: int) -> Bool[Tensor, " n"]:
    taken = torch.zeros(len(keys), dtype=torch.bool)
    # Stable, so that ties are resolved by the order of the data.
    taken[keys.argsort(stable=True)[:n_points]] = True
    return taken


def _taken(
    kept: list[tuple[ModelInput, Tensor, Tensor]], taken: Bool[Tensor, " n"]
) -> list[tuple[ModelInput, Tensor, Tensor]]:
    if bool(taken.all()):
        return kept
    parts = zip(kept, taken.split([len(k) for *_, k in kept]), strict=True)
    return [(x.rows(at.nonzero()[:, 0]), y[at.to(y.device)], k[at]) for (x, y, k), at in parts if bool(at.any())]


def _joined(batches: list[tuple[ModelInput, Tensor]]) -> list[tuple[ModelInput, Tensor]]:
    """One batch if all inputs have one shape; else the batches as they are."""
    if not batches:
        return []
    first = batches[0][0]
    shapes = [[_trailing(x, v) for _, v in x.leaves()] for x, _ in batches]
    if any(s != shapes[0] or None in s for s in shapes):
        return batches  # an argument that is not batched belongs to the data it came with
    args = tuple(torch.cat(column) for column in zip(*(x.args for x, _ in batches), strict=True))
    kwargs = {key: torch.cat([x.kwargs[key] for x, _ in batches]) for key in first.kwargs}
    return [(ModelInput(args, kwargs, sum(x.n for x, _ in batches)), torch.cat([y for _, y in batches]))]


def _trailing(x: ModelInput, value: object) -> tuple[object, ...] | None:
    return (value.dtype, *value.shape[1:]) if isinstance(value, Tensor) and x.batched(value) else None
