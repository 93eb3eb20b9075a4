"""Batches: a re-iterable of (x, y), whatever the model accepts as x."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lapwing import foreign, ranks
from lapwing.errors import InputError, InputTypeError, ShapeError
from lapwing.linalg import all_finite

_ROWS = 256  # rows per batch when the user handed over whole arrays
_ARRAYS = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class ModelInput:
    """What the model is called with: positional and keyword arguments for a batch of n data.

    Tensors whose first axis has length n carry the batch; everything else is passed along whole. A table that was seen
    to be passed along so stays what it is where n happens to be its length.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    n: int
    origin: str = ""  # which of the user's batches these data are, in words; for messages
    shared: frozenset[str] = frozenset()  # names of tensors that are known to carry no batch
    sizes: tuple[int, ...] = ()  # of the user's batches, where several were put together

    def mapped(self, function: Callable[[Any], Any], n: int) -> ModelInput:
        args, kwargs = tuple(function(v) for v in self.args), {key: function(v) for key, v in self.kwargs.items()}
        return ModelInput(args, kwargs, n, self.origin, self.whole)

    def batched(self, value: Any) -> bool:
        """Whether one of the arguments carries the batch."""
        as_long = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self.n
        return as_long and not any(value is v for name, v in self._named() if name in self.shared)

    @property
    def whole(self) -> frozenset[str]:
        """Names of the tensors that carry no batch. What goes with every datum by broadcasting may carry one later."""
        long = ((name, v) for name, v in self._named() if isinstance(v, Tensor) and v.ndim > 0 and len(v) != 1)
        return frozenset(name for name, value in long if not self.batched(value))

    def _named(self) -> list[tuple[str, Any]]:
        return [*((str(i), v) for i, v in enumerate(self.args)), *self.kwargs.items()]

    def rows(self, index: slice | Tensor) -> ModelInput:
        """The data at some rows of the batch."""
        n = len(torch.arange(self.n)[index])
        return self.mapped(lambda v: v[index] if self.batched(v) else v, n)

    def leaves(self) -> list[tuple[str, Any]]:
        named = [(f"positional input {i}" if len(self.args) > 1 else "the input", v) for i, v in enumerate(self.args)]
        return named + [(f"input '{key}'", v) for key, v in self.kwargs.items()]

    def described(self) -> str:
        """What each input is: `the input: float32 (6, 2)`."""
        return ", ".join(f"{name}: {_kind(value)}" for name, value in self.leaves())


def as_input(x: Any, where: str = "x") -> ModelInput:
    """A tensor, array, tuple (positional arguments) or mapping (keyword arguments) as a ModelInput."""
    if isinstance(x, ModelInput):
        return x
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    if isinstance(x, Mapping):
        args, kwargs = (), {key: _as_tensor(v, where) for key, v in x.items()}
    elif isinstance(x, tuple | list):
        args = tuple(_as_tensor(v, where) for v in x)
    else:
        args = (_as_tensor(x, where),)
    if any(isinstance(v, Tensor) and v.is_nested for v in (*args, *kwargs.values())):
        raise InputTypeError(f"{where}: nested tensors have no rows of one shape. Pad them: x.to_padded_tensor(0.0).")
    sizes = [v.shape[0] for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim > 0]
    if not sizes:
        raise InputTypeError(
            f"{where}: expected a tensor, a tuple of tensors or a mapping of tensors with the batch as first axis, "
            f"got {type(x).__name__}. A single datum needs a batch axis: x[None]."
        )
    result = ModelInput(args, kwargs, sizes[0])
    if result.n == 0:
        raise InputError(f"{where}: the batch is empty (first axis of length 0).")
    _check_dense(result, where)
    _check_finite(result, where)
    return result


@dataclass(frozen=True, eq=False)
class Batches:
    """The user's data as (ModelInput, targets) pairs; iterating again gives the data again."""

    source: Iterable[Any]

    def __iter__(self) -> Iterator[tuple[ModelInput, Any]]:
        seen, left, shared = 0, _without_padding(self.source), None
        for number, batch in enumerate(self.source):
            x, y = _split(batch, f"batch {number}")
            if left is not None and x.n > left:
                x, y = x.rows(slice(0, left)), tuple(v[:left] for v in y) if isinstance(y, tuple) else y[:left]
            if left is not None:
                left -= x.n
            seen += 1
            shared = x.whole if shared is None else shared
            if x.n:
                yield replace(x, origin=f"batch {number}", shared=x.shared | shared), y
        if not seen and not ranks.many():  # of several ranks some may have nothing to do
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
        return ranks.first_of(lambda: self)

    @property
    def in_memory(self) -> bool:
        """Whole arrays: the same order at every pass."""
        return isinstance(self.source, _Arrays)


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


def as_batches(data: Any, where: str = "data") -> Batches:
    """A DataLoader, Dataset, (X, Y) of tensors or arrays, or any re-iterable of batches."""
    foreign.refuse_data(data, where)
    if isinstance(data, Batches):
        return data
    if isinstance(data, DataLoader):
        return Batches(data)
    if isinstance(data, IterableDataset | Dataset):
        return Batches(DataLoader(data, batch_size=_ROWS))
    # A tuple is (X, Y); a list is a list of batches, even when there are two of them: [(x, y), (x, y)].
    if isinstance(data, tuple) and len(data) == 2 and _holds_arrays(data[0]):
        return Batches(_Arrays(*data, where=where))
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], list) and isinstance(data[1], _ARRAYS):
        return Batches(_Arrays(tuple(data[0]), data[1], where=where))  # ([X1, X2], Y): Y alone is no batch
    if isinstance(data, list) and len(data) == 2 and all(isinstance(v, _ARRAYS) for v in data):
        return Batches(_Arrays(*data, where=where))
    if isinstance(data, Mapping):
        return Batches([data])
    if isinstance(data, tuple) and len(data) > 2 and all(isinstance(v, _ARRAYS) for v in data):
        raise InputTypeError(
            f"{where}: expected a pair (X, Y), got {len(data)} arrays. "
            "Several model inputs go into X as a tuple: ((X1, X2), Y)."
        )
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Tensor | np.ndarray):
        _check_re_iterable(data, where)
        return Batches(data)
    raise InputTypeError(
        f"{where}: expected a DataLoader, a Dataset, a pair (X, Y) or an iterable of (x, y) batches, "
        f"got {type(data).__name__}."
    )


def _check_re_iterable(data: Iterable[Any], where: str) -> None:
    # An iterator is its own iter(); a wrapper around one hands the same one out twice. Either would lose batches.
    if isinstance(data, Iterator) or iter(data) is iter(data):
        raise InputTypeError(
            f"{where} is a one-shot iterator ({type(data).__name__}); Lapwing needs several passes. "
            "Pass a list of batches, a DataLoader, or (X, Y)."
        )


class _Arrays:
    """(X, Y) held in memory, handed out in order, some rows at a time."""

    def __init__(self, x: Any, y: Any, *, where: str) -> None:
        self.x = as_input(x, f"{where}: X")
        self.y = _targets(y if isinstance(y, tuple | Tensor | np.ndarray) else np.asarray(y), f"{where}: Y")
        first = self.y[0] if isinstance(self.y, tuple) else self.y
        if not isinstance(first, Tensor) or first.ndim == 0:
            raise InputTypeError(
                f"{where}: Y must be a tensor or array with one row per datum, got {type(y).__name__}."
            )
        if first.shape[0] != self.x.n:
            raise ShapeError(f"{where}: X has {self.x.n} rows but Y has {first.shape[0]}; they must pair up.")

    def __len__(self) -> int:
        return (self.x.n + _ROWS - 1) // _ROWS

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, self.x.n, _ROWS):
            rows = slice(start, start + _ROWS)
            y = tuple(v[rows] for v in self.y) if isinstance(self.y, tuple) else self.y[rows]
            yield self.x.rows(rows), y


def _split(batch: Any, where: str) -> tuple[ModelInput, Any]:
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise InputError(
                f"{where}: a mapping must hold its targets under 'labels'; its keys are {', '.join(map(str, batch))}."
            )
        x, y = {key: v for key, v in batch.items() if key != "labels"}, batch["labels"]
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        x, y = batch
    else:
        what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        raise InputTypeError(
            f"{where}: expected a pair (x, y) or a mapping with 'labels', got {what}. "
            "Several model inputs go into x as a tuple: ((x1, x2), y)."
        )
    inputs = x if isinstance(x, ModelInput) else as_input(x, where)
    return inputs, _targets(y, where)


def _targets(y: Any, where: str) -> Any:
    return tuple(_as_tensor(v, where) for v in y) if isinstance(y, tuple | list) else _as_tensor(y, where)


def _as_tensor(value: Any, where: str) -> Any:
    """NumPy arrays become tensors, copied; everything else stays what it is."""
    if not isinstance(value, np.ndarray | np.generic):
        return value
    try:
        return torch.from_numpy(np.array(value))
    except TypeError:
        raise InputTypeError(
            f"{where}: an array of dtype {value.dtype} cannot be turned into a tensor; encode it as numbers."
        ) from None


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _holds_arrays(x: Any) -> bool:
    if isinstance(x, Mapping):
        return any(_holds_arrays(v) for v in x.values())
    if isinstance(x, tuple):
        return any(isinstance(v, _ARRAYS) for v in x)
    return isinstance(x, _ARRAYS)


def _check_dense(x: ModelInput, where: str) -> None:
    for name, value in x.leaves():
        if x.batched(value) and value.layout is not torch.strided:
            raise InputTypeError(
                f"{where}: {name} is sparse ({str(value.layout).removeprefix('torch.')}), and torch takes no rows out "
                "of such a tensor. Use x.to_dense(), some data at a time if that is large."
            )


def _check_finite(x: ModelInput, where: str) -> None:
    for name, value in x.leaves():
        if isinstance(value, Tensor) and value.is_floating_point() and not all_finite(value):
            bad = torch.nonzero(~torch.isfinite(value))[0].tolist()
            raise InputError(
                f"{where}: {name} has a NaN or infinite value at index {tuple(bad)}. "
                "Clean or impute the data first; error bars on NaN mean nothing."
            )
