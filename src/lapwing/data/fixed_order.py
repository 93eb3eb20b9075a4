"""Data in the same order at every pass, for algorithms that store a value per datum between passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lapwing.data import Batches, ModelInput, Unlabelled
from lapwing.errors import InputError

D = TypeVar("D", Batches, Unlabelled)


def in_fixed_order(data: Batches) -> Batches:
    """Data with a fixed order: unshuffled if possible, otherwise read once and kept in memory.

    Arrays, lists and sequential loaders are returned unchanged, a shuffling DataLoader is replaced by one without
    shuffling. Sums over data do not depend on the order.
    """
    fixed = unshuffled(data)
    return replace(data, source=[_copied(x, y) for x, y in data]) if fixed is None else fixed


def unshuffled(data: Batches) -> Batches | None:
    """The same data in an order that is reproducible in another process; None if that is impossible or unknown."""
    source = data.source
    if not isinstance(source, DataLoader):
        return data if isinstance(source, list | tuple) or data.in_order else None
    if isinstance(source.dataset, IterableDataset) or source.batch_size is None:
        return None
    if isinstance(source.sampler, SequentialSampler | DistributedSampler):  # the latter shuffles by seed and epoch
        return data
    if not isinstance(source.sampler, RandomSampler) or source.sampler.replacement or source.drop_last:
        return None
    if source.sampler.num_samples != len(source.sampler.data_source):  # draws a random subset
        return None
    loader: DataLoader[Any] = DataLoader(
        source.dataset,
        batch_size=source.batch_size,
        num_workers=source.num_workers,
        collate_fn=source.collate_fn,
    )
    return replace(data, source=loader)


def in_data_order(data: D) -> D:
    """A shuffling DataLoader without shuffling, so that row i of a result is datum i; other data unchanged."""
    found = unshuffled(data if isinstance(data, Batches) else Batches(data.source))
    if found is not None:
        return replace(data, source=found.source)
    sampler = data.source.sampler if isinstance(data.source, DataLoader) else None
    if isinstance(sampler, RandomSampler):
        raise InputError(
            "This loader samples its rows at random (with replacement, a subset, or with drop_last=True), so rows of "
            "the result cannot be matched to the data. Use a DataLoader without shuffle."
        )
    return data


def _copied(x: ModelInput, y: Any) -> tuple[ModelInput, Any]:
    """A copy of a batch: some loaders reuse the memory of a batch for the next one."""
    return x.mapped(_copy, x.n), tuple(_copy(v) for v in y) if isinstance(y, tuple) else _copy(y)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
