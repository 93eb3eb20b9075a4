"""Partial Cholesky factorisation with diagonal pivoting: a cheap low-rank approximation of a kernel matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor


@dataclass(frozen=True)
class PartialCholesky:
    """K ≈ L Lᵀ with L (n, r); `residual` is trace(K − L Lᵀ)."""

    factor: Float[Tensor, "n r"]
    residual: float


def pivoted_cholesky(K: Float[Tensor, "n n"], *, max_rank: int, rtol: float) -> PartialCholesky:
    """Greedy partial Cholesky of a positive semi-definite K, stopped when trace(K − L Lᵀ) ≤ rtol · trace(K).

    The pivot of each step is the largest remaining diagonal entry. K − L Lᵀ stays positive semi-definite, so its trace
    bounds its spectral and Frobenius norms. Cost: O(n r²) operations in r steps.
    """
    diagonal = K.diagonal().clone()
    residual = trace = float(diagonal.sum())
    L = K.new_zeros(max_rank, len(K))  # rows are the columns of the factor: each update is then contiguous
    rank = 0
    while rank < max_rank and residual > rtol * trace:
        largest, pivot = (v.item() for v in diagonal.max(0))
        # New column of L: (K e_pivot − L Lᵀ e_pivot) / √(remaining diagonal at the pivot)
        row = torch.addmv(K[int(pivot)], L[:rank].T, L[:rank, int(pivot)], alpha=-1).mul_(largest**-0.5)
        L[rank] = row
        diagonal.addcmul_(row, row, value=-1).clamp_(min=0)  # below zero by rounding only
        diagonal[int(pivot)] = 0  # exactly, so that rounding cannot select the pivot again
        residual = float(diagonal.sum())
        rank += 1
    return PartialCholesky(L[:rank].T, residual)


def semidefinite_eigenvalues(K: Float[Tensor, "n n"]) -> Float[Tensor, " r"]:
    """Eigenvalues of a positive semi-definite K; those below its rounding error, n · eps · ‖K‖, are set to zero.

    Kernel matrices of smooth functions have low numerical rank. With K = L Lᵀ, L (n, r), the nonzero eigenvalues are
    those of the small LᵀL. If the rank exceeds n/4 the dense solver is used; both agree up to rounding.
    """
    rtol = torch.finfo(K.dtype).eps
    partial = pivoted_cholesky(K, max_rank=len(K) // 4, rtol=rtol)
    if partial.residual <= rtol * float(K.diagonal().sum()):
        K = partial.factor.T @ partial.factor
    values = torch.linalg.eigvalsh(K)
    return torch.where(values > len(K) * rtol * values[-1:], values, 0.0)
