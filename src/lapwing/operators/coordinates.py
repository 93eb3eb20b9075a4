"""A common eigenbasis of curvature and prior. In it, changing the prior is an elementwise operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lapwing._types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class Coordinates:
    """H = Qᵀ diag(λ) Q and P₀ = Qᵀ diag(δ[index]) Q with Qᵀ Q = I.

    Q is orthogonal, or has more rows than columns where an eigenspace is written in more numbers than it has
    dimensions. A sum over eigenvalues is Σ_k w_k G(λ_k) with the `weights` w.
    """

    eigenvalues: Float[Tensor, " k"]
    index: Int[Tensor, " k"]  # the prior group of each axis
    rotate: Callable[[Tensor], Tensor]  # v → Q v
    weights: Float[Tensor, " k"]
