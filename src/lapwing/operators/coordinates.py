"""A common eigenbasis of curvature and prior. In it, changing the prior is an elementwise operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lapwing._types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Coordinates:
    """H = Qᵀ diag(λ) Q and P₀ = Qᵀ diag(δ[index]) Q for an orthogonal Q."""

    eigenvalues: Float[Tensor, " p"]
    index: Int[Tensor, " p"]  # the prior group of each axis
    rotate: Callable[[Tensor], Tensor]  # v → Q v
