"""Shape-annotated aliases used across the library."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Scalar = Float[Tensor, ""]
State = dict[str, Any]  # an unfinished sum: named tensors, numbers, frozen values, and lists of them

__all__ = ["Bool", "Float", "Int", "Scalar", "Shaped", "State", "Tensor"]
