"""Square roots with derivatives where the plain formula has none: at zero."""

from __future__ import annotations

from typing import Any

import torch

from lapwing._types import Float, Tensor


def safe_sqrt(v: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """√v of variances; where v is zero, so is the derivative: a variance has its minimum there."""
    positive = v > 0
    return torch.where(positive, torch.where(positive, v, 1.0).sqrt(), 0.0)


def symmetric_root(matrix: Float[Tensor, "*n c c"]) -> tuple[Float[Tensor, "*n c c"], Float[Tensor, "*n c"]]:
    """S = U √λ Uᵀ of a positive semi-definite matrix, singular ones too, and λ; negative λ count as zero.

    The derivative solves S dS + dS S = dM: it divides by no difference of eigenvalues. Where the rank changes there is
    none.
    """
    values, U = torch.linalg.eigh(matrix.detach())
    return _Root.apply(matrix, values.clamp_min(0).sqrt(), U), values


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, roots: Tensor, U: Tensor) -> Tensor:
        ctx.save_for_backward(roots, U)
        return (U * roots[..., None, :]) @ U.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # (Uᵀ dS U)_ij = (Uᵀ dM U)_ij / (√λ_i + √λ_j)
        roots, U = ctx.saved_tensors
        sums = roots[..., :, None] + roots[..., None, :]
        # Between directions without variance the matrix does not change to first order, while its rank stays.
        least = torch.finfo(roots.dtype).eps ** 0.5 * roots.amax(-1)[..., None, None]
        inner = torch.where(sums > least, U.mT @ g @ U / torch.where(sums > least, sums, 1.0), 0.0)
        dM = U @ inner @ U.mT
        return (dM + dM.mT) / 2, None, None
