"""Shape-annotated aliases used across the library."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Scalar = Float[Tensor, ""]

__all__ = ["Bool", "Float", "Int", "Scalar", "Shaped", "Tensor"]
