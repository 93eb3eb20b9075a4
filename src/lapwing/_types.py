"""Shape-annotated aliases used across the library."""

from __future__ import annotations

from jaxtyping import Float, Int, Shaped
from torch import Tensor

Scalar = Float[Tensor, ""]

__all__ = ["Float", "Int", "Scalar", "Shaped", "Tensor"]
