"""KL(q ‖ prior) between diagonal Gaussians, in few passes over the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lapwing._types import Float, Scalar, Tensor
from lapwing.priors import GaussianPrior


class Divergence(torch.nn.Module):
    """KL(N(μ, σ²) ‖ N(m, s²)) = ½ Σ [(σ² + (μ − m)²)/s² − 1 + log(s²/σ²)], with what the prior says worked out once.

    Unlu and Aitchison's (30) prints σ² in place of s² in both fractions.
    """

    def __init__(self, prior: GaussianPrior, like: Tensor) -> None:
        super().__init__()
        precision = prior.P0.diagonal.detach()
        self.register_buffer("precision", precision.to(like), persistent=False)
        self.register_buffer("prior_mean", prior.mean.to(like), persistent=False)
        self.constant = -float(precision.log().sum()) - len(precision)  # Σ log s² − P

    precision: Float[Tensor, " p"]
    prior_mean: Tensor

    def forward(self, means: Sequence[Tensor], log_std: Float[Tensor, " p"], variance: Float[Tensor, " p"]) -> Scalar:
        """`variance` is exp(2 `log_std`), in its graph: the penalty needs it too."""
        # Products and sums in the parameters' own dtype: converting them first would write another copy.
        spread = torch.dot(variance, self.precision).double() - 2 * log_std.sum().double()
        return 0.5 * (spread + self.constant + self.distance(means))

    def distance(self, means: Sequence[Tensor]) -> Scalar:
        """Σ (μ − m)²/s²."""
        return _Distance.apply(self.prior_mean, self.precision, *means)


class _Distance(torch.autograd.Function):
    """One tensor at a time: nothing of the size of all parameters is made."""

    @staticmethod
    def forward(ctx: Any, prior_mean: Tensor, precision: Tensor, *means: Tensor) -> Tensor:
        ctx.save_for_backward(prior_mean, precision, *means)
        total = torch.zeros((), dtype=torch.float64, device=precision.device)
        for away, weights in _away(prior_mean, precision, means):
            total += torch.dot(away * weights, away).double()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """∂/∂μ = 2 (μ − m)/s²."""
        prior_mean, precision, *means = ctx.saved_tensors
        parts = _away(prior_mean, precision, means)
        found = [
            (away * weights).mul_(2 * g.to(away.dtype)).view(mean.shape).to(mean.dtype) if needed else None
            for (away, weights), mean, needed in zip(parts, means, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *found


def _away(prior_mean: Tensor, precision: Tensor, means: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """μ − m and 1/s² of each tensor."""
    sizes = [mean.numel() for mean in means]
    flat = [mean.detach().reshape(-1).to(precision.dtype) for mean in means]
    if prior_mean.ndim:
        flat = [mean - m for mean, m in zip(flat, prior_mean.split(sizes), strict=True)]
    elif float(prior_mean):
        flat = [mean - prior_mean for mean in flat]
    return list(zip(flat, precision.split(sizes), strict=True))
