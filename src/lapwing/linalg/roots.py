"""Square roots of numbers and matrices with a finite derivative at zero."""

from __future__ import annotations

from typing import Any

import torch

from lapwing._types import Float, Tensor


def safe_sqrt(v: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """√v of variances v ≥ 0. At v = 0 the derivative is defined as 0, as a variance has its minimum there."""
    # The inner `where` keeps 1/√0 = ∞ out of the backward pass: ∞ · 0 would be NaN.
    positive = v > 0
    return torch.where(positive, torch.where(positive, v, 1.0).sqrt(), 0.0)


def symmetric_root(matrix: Float[Tensor, "*n c c"]) -> tuple[Float[Tensor, "*n c c"], Float[Tensor, "*n c"]]:
    """The root S = U √λ Uᵀ of a positive semi-definite, possibly singular matrix, and λ; negative λ are set to zero.

    The derivative solves the Sylvester equation S dS + dS S = dM. Unlike the derivative of `eigh` it does not divide by
    differences of eigenvalues. It does not exist where the rank changes.
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
        # Between two directions of zero variance dM is zero to first order as long as the rank is constant.
        least = torch.finfo(roots.dtype).eps ** 0.5 * roots.amax(-1)[..., None, None]
        inner = torch.where(sums > least, U.mT @ g @ U / torch.where(sums > least, sums, 1.0), 0.0)
        dM = U @ inner @ U.mT
        return (dM + dM.mT) / 2, None, None
