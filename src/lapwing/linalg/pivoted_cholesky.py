"""Partial Cholesky with diagonal pivoting: the cheap way to see that a matrix has low rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor


@dataclass(frozen=True)
class PartialCholesky:
    """K ≈ L Lᵀ with L (n, r); `residual` bounds trace(K − L Lᵀ)."""

    factor: Float[Tensor, "n r"]
    residual: float


def pivoted_cholesky(K: Float[Tensor, "n n"], *, max_rank: int, rtol: float) -> PartialCholesky:
    """Greedy partial Cholesky of a positive semi-definite K, stopped when trace(K − L Lᵀ) ≤ rtol · trace(K).

    Each step takes the largest remaining diagonal entry as pivot. The residual stays positive semi-definite, so its
    trace bounds the error in every norm. Cost: n r² + r small kernels.
    """
    diagonal = K.diagonal().clone()
    residual = trace = float(diagonal.sum())
    L = K.new_zeros(max_rank, len(K))  # rows are the columns of the factor: each update is then contiguous
    rank = 0
    while rank < max_rank and residual > rtol * trace:
        largest, pivot = (v.item() for v in diagonal.max(0))
        row = torch.addmv(K[int(pivot)], L[:rank].T, L[:rank, int(pivot)], alpha=-1).mul_(largest**-0.5)
        L[rank] = row
        diagonal.addcmul_(row, row, value=-1).clamp_(min=0)
        diagonal[int(pivot)] = 0
        residual = float(diagonal.sum())
        rank += 1
    return PartialCholesky(L[:rank].T, residual)


def semidefinite_eigenvalues(K: Float[Tensor, "n n"]) -> Float[Tensor, " r"]:
    """The eigenvalues of a positive semi-definite K that stand above its rounding error; the others are zero.

    Kernel matrices of smooth functions are numerically low-rank: with K = L Lᵀ, L (n, r), the nonzero
    eigenvalues are those of the small LᵀL. A matrix of more than n/4 ranks goes to the dense solver instead;
    both answers agree to rounding (n · eps · ‖K‖).
    """
    rtol = torch.finfo(K.dtype).eps
    partial = pivoted_cholesky(K, max_rank=len(K) // 4, rtol=rtol)
    if partial.residual <= rtol * float(K.diagonal().sum()):
        K = partial.factor.T @ partial.factor
    values = torch.linalg.eigvalsh(K)
    return torch.where(values > len(K) * rtol * values[-1:], values, 0.0)
