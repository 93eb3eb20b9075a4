"""Batches of (inputs, targets) from a DataLoader, a Dataset, arrays, tables or any re-iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

from lapwing.data import other_libraries
from lapwing.data.columns import Columns
from lapwing.data.frames import frame_targets, is_frame
from lapwing.data.inputs import ModelInput, as_input, as_tensor
from lapwing.data.rows import ROWS, Ragged, Rows, of_numbers, rows_of
from lapwing.errors import InputError, InputTypeError, ShapeError
from lapwing.runtime import distributed

_NUMBERS_IN_LISTS = "numbers in lists are no tensors. Make tensors or arrays of them first: {}."


@dataclass(frozen=True, eq=False)
class Batches:
    """The user's data as pairs (ModelInput, targets). Can be iterated any number of times."""

    source: Iterable[Any]
    columns: Columns | None = None  # columns of mapping batches; None: keyword arguments of the model, and `labels`

    def __iter__(self) -> Iterator[tuple[ModelInput, Any]]:
        seen, left, shared = 0, _without_padding(self.source), None
        for number, batch in enumerate(self.source):
            x, y = pair_of(batch, f"batch {number}", self.columns)
            if left is not None and x.n > left:
                x, y = x.rows(slice(0, left)), tuple(v[:left] for v in y) if isinstance(y, tuple) else y[:left]
            if left is not None:
                left -= x.n
            seen += 1
            # A tensor seen to be unbatched in the first batch stays so, even if a later batch has its length.
            shared = x.whole if shared is None else shared
            if x.n:
                yield replace(x, origin=f"batch {number}", shared=x.shared | shared), y
        if not seen and not distributed.is_distributed():  # a rank may have no data
            raise InputError(
                "The data gave no batch: the loader or data set is empty. Check the sampler, `drop_last` and the split."
            )

    def __len__(self) -> int:
        """Number of batches according to the source; 0 if it is unknown."""
        try:
            return len(self.source) if isinstance(self.source, Sized) else 0
        except TypeError:  # the __len__ of a DataLoader over an IterableDataset raises
            return 0

    def first(self) -> tuple[ModelInput, Any]:
        return next(iter(self))

    def first_on_rank(self) -> tuple[ModelInput, Any] | None:
        """The first batch on this rank, None if it has no data."""
        return next(iter(self), None)

    def first_on_any_rank(self) -> tuple[ModelInput, Any]:
        """The first batch on the lowest rank that has data, the same on all ranks."""
        return distributed.first_item(lambda: self)

    @property
    def in_memory(self) -> bool:
        """Whether the data are arrays (X, Y), which are read in the same order at every pass."""
        return isinstance(self.source, _Arrays)

    @property
    def alike(self) -> bool:
        """Whether all data are known to have the same shape, because they are rows of tensors."""
        if not isinstance(self.source, DataLoader):
            return self.in_memory
        return isinstance(self.source.dataset, TensorDataset) and self.source.collate_fn is default_collate

    @property
    def in_order(self) -> bool:
        """Whether every pass is known to have the same order: arrays, and data sets with an index."""
        return self.in_memory or (isinstance(self.source, Rows) and self.source.indexed)


def _without_padding(source: Any) -> int | None:
    """Number of data on this rank without the padding of a DistributedSampler; None if there is no padding.

    The sampler repeats items so that all ranks get equally many. Item i of rank r is entry r + W i of the list of N
    indices followed by repeats, so the repeats come last on each rank.
    """
    if not isinstance(source, DataLoader):
        return None
    sampler = getattr(source.batch_sampler, "sampler", source.sampler)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last or not isinstance(sampler.dataset, Sized):
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))


def as_batches(data: Any, where: str = "data", columns: Columns | None = None) -> Batches:
    """Batches from a DataLoader, a data set of rows, a pair (X, Y), or any re-iterable of batches."""
    other_libraries.refuse_data(data, where)
    if isinstance(data, Batches):
        return data
    return Batches(_source(data, where, columns), columns)


def _source(data: Any, where: str, columns: Columns | None) -> Iterable[Any]:
    if isinstance(data, DataLoader):
        return data
    rows = rows_of(data, columns)
    if rows is not None:
        return rows
    if isinstance(data, tuple) and len(data) == 2 and of_numbers(data[0]):
        raise InputTypeError(f"{where}: {_NUMBERS_IN_LISTS.format('(torch.tensor(X), torch.tensor(Y))')}")
    # A tuple is (X, Y); a list is a list of batches, even when there are two of them: [(x, y), (x, y)].
    if isinstance(data, tuple) and len(data) == 2 and _holds_arrays(data[0]):
        return _Arrays(*data, where=where, columns=columns)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], list) and is_array(data[1]):
        return _Arrays(
            tuple(data[0]), data[1], where=where, columns=columns
        )  # ([X1, X2], Y), not a pair of batches: Y is an array
    if isinstance(data, list) and len(data) == 2 and all(is_array(v) for v in data):
        return _Arrays(*data, where=where, columns=columns)
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, tuple) and len(data) > 2 and all(is_array(v) for v in data):
        raise InputTypeError(
            f"{where}: expected a pair (X, Y), got {len(data)} arrays. "
            "Several model inputs go into X as a tuple: ((X1, X2), Y)."
        )
    if isinstance(data, Iterable) and not isinstance(data, str | bytes) and not is_array(data):
        _check_re_iterable(data, where)
        return data
    raise InputTypeError(
        f"{where}: expected a DataLoader, a Dataset, a pair (X, Y) or an iterable of (x, y) batches, "
        f"got {type(data).__name__}." + " Inputs and targets go together, as a pair (X, Y)." * is_array(data)
    )


def _check_re_iterable(data: Iterable[Any], where: str) -> None:
    # An iterator returns itself from iter(); a wrapper around one returns the same object twice. The second pass over
    # either would be empty.
    if isinstance(data, Iterator) or iter(data) is iter(data):
        raise InputTypeError(
            f"{where} is a one-shot iterator ({type(data).__name__}); Lapwing needs several passes. "
            "Pass a list of batches, a DataLoader, or (X, Y)."
        )


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """The inputs of batches; targets, if there are any, are ignored."""

    source: Iterable[Any]
    columns: Columns | None = None

    def __iter__(self) -> Iterator[ModelInput]:
        for number, batch in enumerate(self.source):
            where = f"batch {number}"
            x = as_input(_inputs_of(batch, where, self.columns), where)
            yield replace(x, origin=where)

    def __len__(self) -> int:
        return len(Batches(self.source))


def as_inputs(data: Any, columns: Columns | None = None) -> Unlabelled | None:
    """The inputs of a loader, a data set or another iterable of batches, or None if `data` is a single batch.

    A single batch is a tensor, an array, a table, a tuple or list of those (positional arguments) or a mapping.
    """
    if isinstance(data, Batches):
        return Unlabelled(data.source, data.columns)
    if isinstance(data, ModelInput | Mapping | tuple | str | bytes) or is_array(data):
        return None
    if isinstance(data, list) and all(is_array(v) for v in data):
        return None
    rows = rows_of(data, columns)
    if rows is not None or isinstance(data, Iterable):
        return Unlabelled(data if rows is None else rows, columns)
    return None


def _inputs_of(batch: Any, where: str, columns: Columns | None) -> Any:
    if of_numbers(batch):
        raise InputTypeError(f"{where}: {_NUMBERS_IN_LISTS.format('torch.tensor(x)')}")
    if isinstance(batch, tuple | list) and not isinstance(batch, ModelInput):
        if len(batch) not in (1, 2):
            raise InputTypeError(
                f"{where}: expected x, a pair (x, y) or a mapping, got a {type(batch).__name__} of {len(batch)}. "
                "Several model inputs go into x as a tuple: ((x1, x2), y)."
            )
        batch = batch[0]
    return (columns or Columns()).x_of(batch, where) if isinstance(batch, Mapping) else batch


class _Arrays:
    """(X, Y) in memory, split into batches of `ROWS` rows in order."""

    def __init__(self, x: Any, y: Any, *, where: str, columns: Columns | None) -> None:
        x = columns.x_of(x, f"{where}: X") if columns is not None and isinstance(x, Mapping) else x
        self.x = as_input(x, f"{where}: X")
        self.y = _targets(y if isinstance(y, tuple) or is_array(y) else np.asarray(y), f"{where}: Y")
        first = self.y[0] if isinstance(self.y, tuple) else self.y
        if not isinstance(first, Tensor) or first.ndim == 0:
            raise InputTypeError(
                f"{where}: Y must be a tensor or array with one row per datum, got {type(y).__name__}."
            )
        if first.shape[0] != self.x.n:
            raise ShapeError(f"{where}: X has {self.x.n} rows but Y has {first.shape[0]}; they must pair up.")

    def __len__(self) -> int:
        return (self.x.n + ROWS - 1) // ROWS

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, self.x.n, ROWS):
            rows = slice(start, start + ROWS)
            y = tuple(v[rows] for v in self.y) if isinstance(self.y, tuple) else self.y[rows]
            yield self.x.rows(rows), y


def pair_of(batch: Any, where: str, columns: Columns | None) -> tuple[ModelInput, Any]:
    """A batch as (x, targets): a pair, or a mapping that holds the labels."""
    if isinstance(batch, Mapping):
        x, y = (columns or Columns()).split(batch, where)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        x, y = batch
        x = columns.x_of(x, where) if columns is not None and isinstance(x, Mapping) else x
    else:
        what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        advice = (
            "Every batch needs its targets: DataLoader(TensorDataset(X, Y), ...)."
            if is_array(batch) or (isinstance(batch, tuple | list) and len(batch) == 1)
            else "Several model inputs go into x as a tuple: ((x1, x2), y)."
        )
        raise InputTypeError(f"{where}: expected a pair (x, y) or a mapping with 'labels', got {what}. {advice}")
    return as_input(x, where), _targets(y, where)


def _targets(y: Any, where: str) -> Any:
    return tuple(_target(v, where) for v in y) if isinstance(y, tuple | list) else _target(y, where)


def _target(y: Any, where: str) -> Any:
    if isinstance(y, Ragged):
        raise y.error(where)
    return frame_targets(y, where) if is_frame(y) else as_tensor(y, where)


def is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) or is_frame(value)


def _holds_arrays(x: Any) -> bool:
    if isinstance(x, Mapping):
        return any(_holds_arrays(v) for v in x.values())
    if isinstance(x, tuple):
        return any(is_array(v) for v in x)
    return is_array(x)
