"""KL(q ‖ prior) between diagonal Gaussians, and its gradient in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lapwing._types import Float, Scalar, Tensor


def divergence(
    mean: Float[Tensor, " p"],
    log_std: Float[Tensor, " p"],
    prior_mean: Float[Tensor, "*p"],
    prior_std: Float[Tensor, " p"],
) -> Scalar:
    """KL(N(μ, σ²) ‖ N(m, s²)) = ½ Σ [(σ² + (μ − m)²)/s² − 1 + log(s²/σ²)], added up in float64.

    Unlu and Aitchison's (30) prints σ² in place of s² in both fractions.
    """
    return _Divergence.apply(mean, log_std, prior_mean, prior_std)


class _Divergence(torch.autograd.Function):
    """Autograd would keep a dozen vectors of the size of the network for what two expressions say."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_std: Tensor, prior_mean: Tensor, prior_std: Tensor) -> Tensor:
        ctx.save_for_backward(mean, log_std, prior_mean, prior_std)
        log_ratio = log_std - prior_std.log()
        scaled = (mean - prior_mean).div_(prior_std)
        # Σ (e^{2r} − 2r + z²) − P with r = log(σ/s) and z = (μ − m)/s
        terms = (2 * log_ratio).exp_().sub_(log_ratio, alpha=2).addcmul_(scaled, scaled).sub_(1)
        return 0.5 * terms.sum(dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """∂/∂μ = (μ − m)/s²,  ∂/∂ log σ = σ²/s² − 1."""
        mean, log_std, prior_mean, prior_std = ctx.saved_tensors
        g = g.to(mean.dtype)
        of_mean = (mean - prior_mean).div_(prior_std.square()).mul_(g) if ctx.needs_input_grad[0] else None
        of_std = None
        if ctx.needs_input_grad[1]:
            of_std = (log_std - prior_std.log()).mul_(2).expm1_().mul_(g)
        return of_mean, of_std, None, None
