"""The same data in the same order at every pass, so that outputs found in one pass can be used in the next."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lapwing.data import Batches, ModelInput


def in_fixed_order(data: Batches) -> Batches:
    """Arrays, lists and sequential loaders as they are; a shuffling loader without the shuffle; else kept in memory.

    Order does not matter to any sum over data. A loader whose batches come out anew every time, for whatever reason of
    its own, is read once.
    """
    fixed = unshuffled(data)
    return Batches([_copied(x, y) for x, y in data]) if fixed is None else fixed


def unshuffled(data: Batches) -> Batches | None:
    """The same data in an order that the next process would find too; None where there is no telling."""
    source = data.source
    if not isinstance(source, DataLoader):
        return data if isinstance(source, list | tuple) or data.in_memory else None
    if isinstance(source.dataset, IterableDataset) or source.batch_size is None:
        return None
    if isinstance(source.sampler, SequentialSampler | DistributedSampler):  # the latter shuffles by its epoch alone
        return data
    if not isinstance(source.sampler, RandomSampler) or source.sampler.replacement or source.drop_last:
        return None
    if source.sampler.num_samples != len(source.sampler.data_source):
        return None
    return Batches(
        DataLoader(
            source.dataset,
            batch_size=source.batch_size,
            num_workers=source.num_workers,
            collate_fn=source.collate_fn,
        )
    )


def _copied(x: ModelInput, y: Any) -> tuple[ModelInput, Any]:
    """What is kept of a batch: a loader may fill one batch over and over."""
    return x.mapped(_copy, x.n), tuple(_copy(v) for v in y) if isinstance(y, tuple) else _copy(y)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
