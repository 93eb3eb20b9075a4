"""The training data, epoch by epoch: shuffled by the run's own seeds, and counted before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from lapwing.data import Batches, Columns, ModelInput, as_batches
from lapwing.data.rows import Rows, collated
from lapwing.runtime.arguments import counted
from lapwing.runtime.sandbox import random_state_kept


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches in the order that the global random state decides, which the loop seeds anew for every epoch."""

    batches: Batches  # for passes that are no training
    training: Batches

    @classmethod
    def of(cls, data: Any, columns: Columns | None, batch_size: Any) -> Stream:
        """A loader decides its batches itself; arrays and data sets are shuffled, `batch_size` rows at a time."""
        size = counted("batch_size", batch_size, "row")
        batches = as_batches(data, columns=columns)
        return cls(batches, replace(batches, source=_shuffled(data, batches, size)))

    def n_data(self) -> int:
        """How many data one epoch has here; read off a plain loader, else by a pass over the data."""
        known = _announced(self.training.source)
        if known is not None:
            return known
        with random_state_kept():
            return sum(x.n for x, _ in self.training)

    def __len__(self) -> int:
        """How many steps an epoch takes, or 0 where there is no telling."""
        return len(self.training)

    def epoch(self, number: int) -> Iterator[tuple[ModelInput, Any]]:
        source = self.training.source
        if isinstance(source, DataLoader) and hasattr(source.sampler, "set_epoch"):
            source.sampler.set_epoch(number)
        return iter(self.training)

    def generators(self) -> list[torch.Generator]:
        """Those of the user's loader, which decide its order."""
        source = self.training.source
        if not isinstance(source, DataLoader):
            return []
        holders = (source, source.sampler, getattr(source.batch_sampler, "sampler", None))
        found = [g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)]
        return list({id(g): g for g in found}.values())


@dataclass(frozen=True, eq=False)
class _ShuffledRows:
    """Rows of arrays in memory, in a new order at every pass."""

    arrays: Any
    size: int

    def __len__(self) -> int:
        return (self.arrays.x.n + self.size - 1) // self.size

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        x, y = self.arrays.x, self.arrays.y
        for rows in torch.randperm(x.n).split(self.size):
            yield x.rows(rows), tuple(v[rows] for v in y) if isinstance(y, tuple) else y[rows]


def _shuffled(data: Any, batches: Batches, size: int) -> Iterable[Any]:
    source = batches.source
    if batches.in_memory:
        return _ShuffledRows(source, size)
    if isinstance(source, Rows) and source.indexed:
        return DataLoader(source.data, size, shuffle=True, collate_fn=collated)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, size, shuffle=True, collate_fn=collated)
    return source


def _announced(source: Any) -> int | None:
    """Of arrays, and of a loader that takes every row once; None where only a pass can tell."""
    if isinstance(source, _ShuffledRows):
        return source.arrays.x.n
    if not isinstance(source, DataLoader) or isinstance(source.dataset, IterableDataset):
        return None
    sampler, plain = source.sampler, type(source.batch_sampler) is BatchSampler
    if not plain or type(sampler) not in (RandomSampler, SequentialSampler) or source.batch_size is None:
        return None
    assert isinstance(sampler, RandomSampler | SequentialSampler)
    n = len(sampler)
    return n // source.batch_size * source.batch_size if source.drop_last else n
