"""The model's arguments for a batch of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapwing.data.frames import frame_inputs, is_frame
from lapwing.data.rows import Ragged
from lapwing.errors import InputError, InputTypeError
from lapwing.linalg import all_finite


@dataclass(frozen=True, eq=False)
class ModelInput:
    """Positional and keyword arguments of the model for a batch of n data.

    Tensors whose first axis has length n are batched; all other arguments are passed unchanged. A tensor that was
    unbatched in an earlier batch (a lookup table) is in `shared`, and stays unbatched if n happens to be its length.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    n: int
    origin: str = ""  # the user's batch, for error messages: "batch 3"
    shared: frozenset[str] = frozenset()  # names of tensors known to be unbatched
    sizes: tuple[int, ...] = ()  # sizes of the user's batches, if several were joined
    positions: int | None = None  # number of labels per datum, if it differs between batches (sequences)
    attached: bool = False  # whether results are to be differentiable with respect to these inputs

    def mapped(self, function: Callable[[Any], Any], n: int) -> ModelInput:
        args, kwargs = tuple(function(v) for v in self.args), {key: function(v) for key, v in self.kwargs.items()}
        return ModelInput(args, kwargs, n, self.origin, self.whole, positions=self.positions, attached=self.attached)

    def batched(self, value: Any) -> bool:
        """Whether an argument (compared by identity) is batched."""
        as_long = isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self.n
        return as_long and not any(value is v for name, v in self._named() if name in self.shared)

    @property
    def whole(self) -> frozenset[str]:
        """Names of unbatched tensors.

        A first axis of length 1 is not counted: it may be a batch of one that is broadcast, and batched in others.
        """
        long = ((name, v) for name, v in self._named() if isinstance(v, Tensor) and v.ndim > 0 and len(v) != 1)
        return frozenset(name for name, value in long if not self.batched(value))

    def _named(self) -> list[tuple[str, Any]]:
        return [*((str(i), v) for i, v in enumerate(self.args)), *self.kwargs.items()]

    @property
    def requires_grad(self) -> bool:
        """Whether any of the inputs does."""
        return any(isinstance(v, Tensor) and v.requires_grad for _, v in self._named())

    def rows(self, index: slice | Tensor) -> ModelInput:
        """The data at some rows of the batch."""
        n = len(torch.arange(self.n)[index])
        return self.mapped(lambda v: v[index] if self.batched(v) else v, n)

    def leaves(self) -> list[tuple[str, Any]]:
        named = [(f"positional input {i}" if len(self.args) > 1 else "the input", v) for i, v in enumerate(self.args)]
        return named + [(f"input '{key}'", v) for key, v in self.kwargs.items()]

    def described(self) -> str:
        """Dtype and shape of each input, for messages: `the input: float32 (6, 2)`."""
        return ", ".join(f"{name}: {_kind(value)}" for name, value in self.leaves())

    def advice(self) -> str:
        """A hint if the model rejected floating-point inputs with a single axis: a missing feature or batch axis."""
        for name, value in self.leaves():
            if self.batched(value) and value.ndim == 1 and value.is_floating_point():
                return (
                    f" {name[0].upper() + name[1:]} has the shape {tuple(value.shape)}: {self.n} data of one number "
                    "each. If the model takes (N, 1), make it a column: X[:, None], the same as X.unsqueeze(1). "
                    "If it is one datum, give it a batch axis: x[None]."
                )
        return ""


def as_input(x: Any, where: str = "x") -> ModelInput:
    """Convert a tensor, array, tuple (positional arguments) or mapping (keyword arguments) to a ModelInput."""
    if isinstance(x, ModelInput):
        return x
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    if isinstance(x, Mapping):
        args, kwargs = (), {key: _argument(v, f"{where}: input '{key}'") for key, v in x.items()}
    elif isinstance(x, tuple | list):
        args = tuple(_argument(v, where) for v in x)
    else:
        args = (_argument(x, where),)
    if any(isinstance(v, Tensor) and v.is_nested for v in (*args, *kwargs.values())):
        raise InputTypeError(f"{where}: nested tensors have no rows of one shape. Pad them: x.to_padded_tensor(0.0).")
    sizes = [v.shape[0] for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim > 0]
    _check_words(args, kwargs, sizes[0] if sizes else None, where)
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


def _argument(value: Any, where: str) -> Any:
    if isinstance(value, Ragged):
        raise value.error(where)
    return frame_inputs(value, where) if is_frame(value) else as_tensor(value, where)


def _check_words(args: tuple[Any, ...], kwargs: Mapping[str, Any], n: int | None, where: str) -> None:
    """Reject lists of non-numeric objects (text, images), one per datum: they cannot be indexed by rows."""
    for name, value in [*((f"positional input {i}", v) for i, v in enumerate(args)), *kwargs.items()]:
        if not isinstance(value, list) or n not in (None, len(value)):
            continue
        entry = value
        while isinstance(entry, list) and entry:
            entry = entry[0]
        if not isinstance(entry, Tensor | np.ndarray | Number | Mapping | tuple | list | None):
            raise InputTypeError(
                f"{where}: '{name}' holds {type(entry).__name__} objects, one for each datum; inputs are tensors or "
                'arrays of numbers. Turn them into tensors first, or name the columns that are inputs: inputs="image".'
            )


def as_tensor(value: Any, where: str) -> Any:
    """Convert a NumPy array to a tensor; other values are returned unchanged."""
    # Copied: torch.from_numpy would share memory, and warns about read-only arrays.
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
