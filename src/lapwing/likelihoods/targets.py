"""Validation of targets shared by all likelihoods. Targets are never broadcast."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import InputError, InputTypeError, ShapeError


def as_tensor(y: object, *, likelihood: str) -> Tensor:
    """Convert a tensor, an array or nested lists of numbers to a real tensor."""
    try:
        # Lists go through NumPy, which reads Python floats as float64; torch would read them as float32.
        # np.array copies: columns of tables may be read-only, of which torch warns.
        tensor = y if isinstance(y, Tensor) else torch.as_tensor(np.array(y))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputTypeError(
            f"{likelihood} needs targets that are a tensor, an array or nested lists of numbers, "
            f"but {type(y).__name__} came, which does not turn into a tensor ({error}). Convert the targets first."
        ) from error
    if tensor.is_complex():
        raise InputTypeError(
            f"{likelihood} needs real targets, but {tensor.dtype} came. Pass y.real, or model both parts."
        )
    return tensor.clone() if tensor.is_inference() else tensor  # autograd cannot save inference tensors


def in_shape(y: Tensor, expected: tuple[int, ...], *, likelihood: str, meaning: str, advice: str = "") -> Tensor:
    """`y` with the expected shape. (n,) and (n, 1) are converted into each other; any other difference is an error."""
    shape = tuple(y.shape)
    if shape == expected:
        return y
    n = expected[0]
    if {shape, expected} == {(n,), (n, 1)}:
        return y.reshape(expected)
    raise ShapeError(
        f"{likelihood} needs {meaning}: targets of shape {expected}, but {shape} came. "
        f"Targets are never broadcast; {advice or f'reshape them to {expected}'}."
    )


def require_finite(y: Tensor, *, likelihood: str) -> None:
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        index = first_index(~torch.isfinite(y))
        raise InputError(
            f"{likelihood} needs finite targets, but target {index} is {y[index].item()}. "
            "Remove or impute such data before fitting."
        )


def first_index(bad: Tensor) -> tuple[int, ...]:
    """Index of the first True of a mask."""
    return tuple(bad.nonzero()[0].tolist())


def check_class_axis(class_axis: int) -> None:
    if class_axis == 0:
        raise InputError(
            "class_axis is counted on the model's output, batch axis included, so it cannot be 0, the batch axis. "
            "Use 1 for (B, C, H, W) outputs, or -1 when the classes come last."
        )
