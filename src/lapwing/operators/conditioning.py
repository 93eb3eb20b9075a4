"""Checks that a precision matrix is positive definite beyond rounding error; raises a NumericalError otherwise."""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import NumericalError
from lapwing.operators.grouped_diagonal import GroupedDiagonal

_MARGIN = 20  # eigenvalues below 20 · eps · λ_max have about one correct digit
_STEPS = 4  # of inverse iteration


def require_factored(P: Float[Tensor, "p p"], L: Float[Tensor, "p p"], P0: GroupedDiagonal) -> None:
    """Require P = L Lᵀ to be resolved, either as it is or after scaling its diagonal to one (Jacobi scaling).

    The error of a Cholesky factorisation is governed by the condition number of the scaled matrix. So a group with a
    huge prior precision does not reduce the accuracy of the others.
    """
    smallest, largest = smallest_eigenvalue(L), float(torch.linalg.matrix_norm(P))
    if resolved(smallest, largest):
        return
    half = P.diagonal().rsqrt()[:, None]
    if not resolved(smallest_eigenvalue(half * L), float(torch.linalg.matrix_norm(half * P * half.T))):
        require_resolved(smallest, largest, len(P), P0)


def resolved(smallest: float, largest: float) -> bool:
    """Whether the smallest eigenvalue exceeds the rounding error, `_MARGIN` · eps · λ_max."""
    return smallest > _MARGIN * torch.finfo(torch.float64).eps * largest


def require_resolved(smallest: float, largest: float, p: int, P0: GroupedDiagonal) -> None:
    """Raise a NumericalError with eigenvalues and prior precisions unless `resolved`."""
    if resolved(smallest, largest):
        return
    low, high = float(P0.values.detach().min()), float(P0.values.detach().max())
    condition = f"{largest / smallest:.2g}" if smallest > 0 else "infinite"
    raise NumericalError(
        f"The posterior precision ({p} × {p}) is not positive definite beyond rounding: its smallest eigenvalue is "
        f"{smallest:.3g}, its largest {largest:.3g} (condition number {condition}; at most "
        f"{1 / (_MARGIN * torch.finfo(torch.float64).eps):.1g} can be resolved), with prior precisions from {low:.3g} "
        f'to {high:.3g}. The prior is lost in the rounding of the curvature: use a larger prior precision, or "kron" '
        'or "diag".'
    )


def require_semidefinite(left: Float[Tensor, "*p"], whole: Float[Tensor, "*p"], rounding: float = 1e-9) -> None:
    """Require eigenvalues after a downdate (data removed) to be non-negative up to the rounding error of `whole`."""
    smallest, largest = float(left.min()), float(whole.max())
    if smallest < -rounding * largest:
        raise NumericalError(
            f"Without these data the curvature would not be positive semi-definite: its smallest eigenvalue would be "
            f"{smallest:.3g}, with {largest:.3g} the largest before. They were not all among the data of the fit, or "
            "are taken out twice. Fit again without them."
        )


def smallest_eigenvalue(L: Float[Tensor, "p p"]) -> float:
    """An upper estimate of the smallest eigenvalue of L Lᵀ by inverse iteration; O(p²) per step."""
    if not len(L):
        return float("inf")
    # A fixed start vector: no random numbers, and unlike a constant vector rarely orthogonal to the eigenvector.
    v = torch.cos(torch.arange(len(L), dtype=L.dtype, device=L.device))[:, None]
    growth = 1.0
    for _ in range(_STEPS):
        v = torch.cholesky_solve(v / v.norm(), L)
        growth = float(v.norm())
    return 1 / growth
