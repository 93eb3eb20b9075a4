"""Quantiles of mixtures, by bisection on the distribution function."""

from __future__ import annotations

from math import pi

import torch

from lapwing._types import Float, Tensor


def mixture_quantile(means: Float[Tensor, "s ..."], stds: Float[Tensor, "s ..."], level: float) -> Float[Tensor, ...]:
    """q with (1/S) Σ_s Φ((q − m_s)/s_s) = level."""
    q = _bisected(means.detach(), stds.detach(), level)
    if not (means.requires_grad or stds.requires_grad):
        return q
    # F(q; m, s) = level holds for all m and s, so dq = −dF / F′(q): the derivative of a Newton step from there.
    z = (q - means) / stds
    density = ((-0.5 * z.square()).exp() / (2 * pi) ** 0.5 / stds).mean(0)
    return q - (torch.special.ndtr(z).mean(0) - level) / density.detach()


def _bisected(means: Float[Tensor, "s ..."], stds: Float[Tensor, "s ..."], level: float) -> Float[Tensor, ...]:
    z = torch.special.ndtri(torch.tensor(level, dtype=means.dtype))
    ends = means + z * stds  # the mixture's quantile lies between those of its components
    low, high = ends.amin(0), ends.amax(0)
    # 60 halvings exhaust the digits of float64.
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle - means) / stds).mean(0) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def poisson_mixture_quantile(
    rates: Float[Tensor, "s ..."], weights: Float[Tensor, " s"], level: float
) -> Float[Tensor, ...]:
    """The smallest count k with Σ_s w_s P(Y ≤ k | rate_s) ≥ level."""
    # P(Y ≤ k | rate) = Q(k + 1, rate), the regularised upper incomplete gamma function.
    w = weights.reshape(-1, *[1] * (rates.ndim - 1))

    def cdf(k: Tensor) -> Tensor:
        return (w * torch.special.gammaincc(k + 1, rates)).sum(0)

    low = torch.full_like(rates[0], -1.0)
    # 20 standard deviations above the largest rate the probability left is negligible.
    high = torch.ceil(rates.amax(0) + 20 * rates.amax(0).sqrt() + 20)
    for _ in range(64):  # invariant: cdf(low) < level ≤ cdf(high)
        middle = torch.floor((low + high) / 2)
        below = (middle < 0) | (cdf(middle.clamp(min=0)) < level)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high
