"""Shape-annotated tensor types (jaxtyping) and aliases used across the library."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Scalar = Float[Tensor, ""]
# What a checkpoint stores of an accumulator: tensors, numbers and frozen dataclasses by name, and lists of them.
State = dict[str, Any]

__all__ = ["Bool", "Float", "Int", "Scalar", "Shaped", "State", "Tensor"]
