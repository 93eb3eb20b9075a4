"""Batches from data sets that return one row (datum) at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import IterableDataset as TorchIterable

from lapwing.data.columns import Columns
from lapwing.data.frames import is_frame
from lapwing.errors import InputTypeError, ShapeError

ROWS = 256  # batch size for arrays and data sets


def rows_of(data: Any, columns: Columns | None) -> Iterable[Any] | None:
    """A re-iterable of batches if `data` is a data set of rows; None if it yields batches or is something else."""
    if isinstance(data, DataLoader):
        return None
    if _from_hugging_face(data):
        return Rows(data)
    if isinstance(data, Dataset | TorchIterable):
        return DataLoader(data, batch_size=ROWS, collate_fn=collated)
    indexed = isinstance(data, Sized) and hasattr(data, "__getitem__")
    if not indexed or is_frame(data) or isinstance(data, tuple | Mapping | str | bytes | Tensor | np.ndarray):
        return None
    # A list may hold rows or batches: the first item decides.
    return Rows(data) if len(data) and _is_row(data[0], columns) else None


@dataclass(frozen=True, eq=False)
class Rows:
    """Batches of the rows of a data set, in the order of the data set."""

    data: Any

    @property
    def indexed(self) -> bool:
        """Whether the data set is map-style, so that every pass has the same order."""
        return isinstance(self.data, Sized) and hasattr(self.data, "__getitem__")

    def __len__(self) -> int:
        return -(-len(self.data) // ROWS) if isinstance(self.data, Sized) else 0

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.data) if hasattr(self.data, "__iter__") else (self.data[i] for i in range(len(self.data)))
        while some := list(islice(rows, ROWS)):
            yield collated(some)


def collated(rows: list[Any]) -> Any:
    """Collate rows to a batch: mappings by column, tuples by position, tensors and numbers stacked.

    Unlike `torch.utils.data.default_collate`, a list of numbers is the vector of one datum, as in `datasets.Dataset`.
    """
    return _stacked(rows, "")


def _stacked(values: list[Any], name: str) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        keys = list(first)
        if any(list(row) != keys and set(row) != set(keys) for row in values):
            raise InputTypeError("Rows of one data set must have the same columns; some have others.")
        return {key: _stacked([row[key] for row in values], f"column '{key}'") for key in keys}
    if isinstance(first, tuple) or (isinstance(first, list) and not _no_entries(first)):
        return tuple(_stacked(list(column), f"entry {i}") for i, column in enumerate(zip(*values, strict=True)))
    if isinstance(first, Tensor | np.ndarray | np.generic | Number | list):
        return _tensor([_whole(value) for value in values], name or "the rows")
    return values  # text and other objects: an error only if the column is an input


def _no_entries(value: list[Any]) -> bool:
    """Whether a list is one vector or matrix of numbers, as opposed to a row (x, y)."""
    return all(_no_entries(v) if isinstance(v, list) else isinstance(v, Number | np.generic | str) for v in value)


def of_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, or of lists of them: what should have been a tensor."""
    while isinstance(value, list) and value and isinstance(value[0], list):
        value = value[0]
    return isinstance(value, list) and bool(value) and all(isinstance(v, Number | np.generic) for v in value)


def _whole(value: Any) -> Any:
    """An entry of a row as a tensor; non-numeric entries are returned unchanged."""
    if isinstance(value, Tensor):
        return value
    try:
        # Through NumPy, which reads Python floats as float64; torch.tensor would read them as float32.
        array = np.asarray(value)
        return value if array.dtype.kind not in "biufc" else torch.from_numpy(np.array(array))
    except (TypeError, ValueError):
        return value


def _tensor(values: list[Any], name: str) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        return Ragged(name, shapes[0], shapes[-1])
    return torch.stack(values)


@dataclass(frozen=True)
class Ragged:
    """A column whose rows have different shapes; raises only when the column is used."""

    name: str
    shortest: tuple[int, ...]
    longest: tuple[int, ...]

    def error(self, where: str) -> ShapeError:
        return ShapeError(
            f"{where}: the rows of {self.name} have different shapes, such as {self.shortest} and {self.longest}. "
            "Pad them: pass a DataLoader(data, batch_size=32, collate_fn=...) that does "
            "(transformers.DataCollatorWithPadding(tokenizer), for instance)."
        )


def _from_hugging_face(data: Any) -> bool:
    """Whether this is a `datasets.Dataset` or `IterableDataset`, which yield rows; not a DatasetDict, a mapping."""
    if isinstance(data, Mapping) or type(data).__module__.partition(".")[0] != "datasets":
        return False
    return hasattr(data, "__iter__")


def _is_row(item: Any, columns: Columns | None) -> bool:
    """Whether (x, y) or a mapping is a single datum: its target is a scalar, that of a batch has at least one axis."""
    if isinstance(item, Mapping):
        return any(_is_scalar(item[name]) for name in (columns or Columns()).targets if name in item)
    if not isinstance(item, tuple | list) or len(item) != 2:
        return False
    x, y = item
    return _is_scalar(y) and not _is_scalar(x) and not isinstance(x, str)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 0
    return isinstance(value, Number | np.generic)
