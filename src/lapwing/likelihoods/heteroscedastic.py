"""Heteroscedastic Gaussian likelihood: the network outputs the natural parameters of mean and variance."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi, sqrt
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.errors import InputError, ShapeError
from lapwing.likelihoods.base import Likelihood, Sites
from lapwing.likelihoods.targets import as_tensor, check_class_axis, in_shape, require_finite


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    """Two outputs per target: η₁ = f₁ = μ/σ² and η₂ = −½ h(f₂) = −1/(2σ²), h = exp or softplus.

    log p(y | f) = η₁ y + η₂ y² + η₁²/(4η₂) + ½ log(−2η₂) − ½ log 2π

    Λ is the Fisher information D Λ_η D with D = diag(1, dη₂/df₂) and Λ_η = Cov(y, y²). It is positive definite and
    independent of y, whereas the Hessian in f may be indefinite. With the precision h = 1/σ² and ρ = h′/h,

    Λ = [[σ², −ρμ], [−ρμ, ρ²(f₁²σ² + ½)]].
    """

    link: Literal["exp", "softplus"] = "exp"
    class_axis: int = -1

    canonical = False

    def __post_init__(self) -> None:
        check_class_axis(self.class_axis)
        if self.link not in ("exp", "softplus"):
            raise InputError(f"HeteroscedasticGaussian knows the links 'exp' and 'softplus', but {self.link!r} came.")

    def encode(self, y: object, sites: Sites, n: int) -> Tensor:
        """Real targets (n, *site_shape) → (n, T)."""
        if sites.c != 2:
            raise ShapeError(
                "HeteroscedasticGaussian needs 2 outputs per target (natural parameters of mean and variance), but the "
                f"model gives {sites.c}. Give the network 2 outputs on axis {self.class_axis}, or use Gaussian()."
            )
        targets = as_tensor(y, likelihood="HeteroscedasticGaussian")
        expected, meaning = (n, *sites.site_shape), "one target per pair of outputs"
        targets = in_shape(targets, expected, likelihood="HeteroscedasticGaussian", meaning=meaning)
        require_finite(targets, likelihood="HeteroscedasticGaussian")
        return (targets if targets.is_floating_point() else targets.double()).reshape(n, sites.t)

    def natural_to_moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Mean μ = f₁/h and variance σ² = 1/h: (..., 2) → (...), (...)."""
        variance = (-self._log_precision(f[..., 1])).exp()
        return f[..., 0] * variance, variance

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        log_h = self._log_precision(f[..., 1])
        standardised = y.to(f.dtype) * (log_h / 2).exp() - f[..., 0] * (-log_h / 2).exp()
        return 0.5 * (log_h - standardised.square() - log(2 * pi))

    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        y = y.to(f.dtype)
        mean, variance = self.natural_to_moments(f)
        # r₂ = −½ h′ (y² − E y²) with E y² = μ² + σ²
        r2 = 0.5 * self._log_slope(f[..., 1]) * (1 - (y - mean) * (y + mean) / variance)
        return torch.stack([y - mean, r2], -1)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.natural_to_moments(f)
        rho = self._log_slope(f[..., 1])
        cross = -rho * mean
        corner = rho.square() * (f[..., 0].square() * variance + 0.5)
        return torch.stack([torch.stack([variance, cross], -1), torch.stack([cross, corner], -1)], -2)

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        """S = [[σ, 0], [−ρ f₁ σ, ρ/√2]], the Cholesky factor of Λ."""
        std = (-self._log_precision(f[..., 1]) / 2).exp()
        rho = self._log_slope(f[..., 1])
        below = -rho * f[..., 0] * std
        rows = [torch.stack([std, torch.zeros_like(std)], -1), torch.stack([below, rho / sqrt(2)], -1)]
        return torch.stack(rows, -2)

    def sample(self, f: Tensor, *, generator: torch.Generator) -> Tensor:
        mean, variance = self.natural_to_moments(f)
        eps = torch.randn(mean.shape, generator=generator, dtype=f.dtype, device=generator.device)
        return mean + variance.sqrt() * eps.to(f.device)

    def _log_precision(self, f2: Tensor) -> Tensor:
        """log h(f₂)."""
        if self.link == "exp":
            return f2
        # For x < −20, log softplus(x) = x − eˣ/2 + O(e²ˣ): softplus itself would underflow to 0 for large negative x.
        # −logsigmoid(−x) instead of F.softplus(x), which is linear above 20 and so loses digits in float64.
        # The inner `where` keeps NaN out of the gradient of the branch that is not selected.
        small = f2 < -20
        log_softplus = (-logsigmoid(-torch.where(small, 0.0, f2))).log()
        return torch.where(small, f2 - 0.5 * torch.where(small, f2, 0.0).exp(), log_softplus)

    def _log_slope(self, f2: Tensor) -> Tensor:
        """ρ = h′/h = d log h / df₂."""
        if self.link == "exp":
            return torch.ones_like(f2)
        return (logsigmoid(f2) - self._log_precision(f2)).exp()
