"""Batches: a re-iterable of (x, y), whatever the model accepts as x."""

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
    """The user's data as (ModelInput, targets) pairs; iterating again gives the data again."""

    source: Iterable[Any]
    columns: Columns | None = None  # what mapping batches hold, where that is not the model's keywords and `labels`

    def __iter__(self) -> Iterator[tuple[ModelInput, Any]]:
        seen, left, shared = 0, _without_padding(self.source), None
        for number, batch in enumerate(self.source):
            x, y = pair_of(batch, f"batch {number}", self.columns)
            if left is not None and x.n > left:
                x, y = x.rows(slice(0, left)), tuple(v[:left] for v in y) if isinstance(y, tuple) else y[:left]
            if left is not None:
                left -= x.n
            seen += 1
            shared = x.whole if shared is None else shared
            if x.n:
                yield replace(x, origin=f"batch {number}", shared=x.shared | shared), y
        if not seen and not distributed.is_distributed():  # of several ranks some may have nothing to do
            raise InputError(
                "The data gave no batch: the loader or data set is empty. Check the sampler, `drop_last` and the split."
            )

    def __len__(self) -> int:
        """How many batches are announced; 0 when the source cannot say."""
        try:
            return len(self.source) if isinstance(self.source, Sized) else 0
        except TypeError:  # a DataLoader over an iterable data set has __len__ but refuses to answer
            return 0

    def first(self) -> tuple[ModelInput, Any]:
        return next(iter(self))

    def first_here(self) -> tuple[ModelInput, Any] | None:
        """The first batch of this rank, if it has any."""
        return next(iter(self), None)

    def first_of_all(self) -> tuple[ModelInput, Any]:
        """The first batch, where the data are spread over ranks the first that any of them has: all see the same."""
        return distributed.first_item(lambda: self)

    @property
    def in_memory(self) -> bool:
        """Whole arrays: the same order at every pass."""
        return isinstance(self.source, _Arrays)

    @property
    def alike(self) -> bool:
        """Whether all data are known to have one shape: rows of tensors."""
        if not isinstance(self.source, DataLoader):
            return self.in_memory
        return isinstance(self.source.dataset, TensorDataset) and self.source.collate_fn is default_collate

    @property
    def in_order(self) -> bool:
        """Whether every pass has the same order: whole arrays, and rows with an index."""
        return self.in_memory or (isinstance(self.source, Rows) and self.source.indexed)


def _without_padding(source: Any) -> int | None:
    """How many of a DistributedSampler's data are not repeats to even out the shards; None where nothing is repeated.

    They come last: position i of rank r is item r + W i of a list that goes on from its start behind its N items.
    """
    if not isinstance(source, DataLoader):
        return None
    sampler = getattr(source.batch_sampler, "sampler", source.sampler)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last or not isinstance(sampler.dataset, Sized):
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))


def as_batches(data: Any, where: str = "data", columns: Columns | None = None) -> Batches:
    """A DataLoader, a data set of rows, (X, Y) of tensors, arrays or tables, or any re-iterable of batches."""
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
    if isinstance(data, tuple) and len(data) == 2 and any(map(of_numbers, data)):
        raise InputTypeError(f"{where}: {_NUMBERS_IN_LISTS.format('(torch.tensor(X), torch.tensor(Y))')}")
    # A tuple is (X, Y); a list is a list of batches, even when there are two of them: [(x, y), (x, y)].
    if isinstance(data, tuple) and len(data) == 2 and _holds_arrays(data[0]):
        return _Arrays(*data, where=where, columns=columns)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], list) and is_array(data[1]):
        return _Arrays(tuple(data[0]), data[1], where=where, columns=columns)  # ([X1, X2], Y): Y alone is no batch
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
    # An iterator is its own iter(); a wrapper around one hands the same one out twice. Either would lose batches.
    if isinstance(data, Iterator) or iter(data) is iter(data):
        raise InputTypeError(
            f"{where} is a one-shot iterator ({type(data).__name__}); Lapwing needs several passes. "
            "Pass a list of batches, a DataLoader, or (X, Y)."
        )


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """The inputs of batches as they come; targets that come with them are left out."""

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
    """A loader, a data set or any other iterable of batches, with or without targets; None for inputs of one batch.

    One batch is a tensor, an array, a table, a tuple or list of those (positional arguments) or a mapping.
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
    """(X, Y) held in memory, handed out in order, some rows at a time."""

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
