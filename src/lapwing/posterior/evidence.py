"""The Laplace approximation of the evidence, and quantities from its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.operators import Curvature, GroupedDiagonal, Precision
from lapwing.priors import GaussianPrior


@dataclass(frozen=True, eq=False)
class Evidence:
    """log Z split into its terms: fit, log determinant ratio (Occam factor), and distance from the prior mean."""

    log_lik: Scalar
    log_det_ratio: Scalar  # log det P − log det P₀
    scatter: Scalar  # (θ − m₀)ᵀ P₀ (θ − m₀)
    std_error: float = 0.0  # of the total, if the determinant is estimated

    @property
    def total(self) -> Scalar:
        return self.log_lik - 0.5 * (self.log_det_ratio + self.scatter)


def log_evidence(log_lik: Scalar, precision: Precision, prior: GaussianPrior, theta: Float[Tensor, " p"]) -> Evidence:
    """Laplace approximation to log p(D), split into its three terms.

    log Z ≈ log p(D | θ*) − ½ (log det P − log det P₀) − ½ (θ* − m₀)ᵀ P₀ (θ* − m₀)

    The factors (2π)^{P/2} of prior and posterior cancel; `log_lik` contains every other constant. Exact for a linear
    model with Gaussian likelihood and dense curvature, at its mode. Cost: one `logdet`. MacKay (1992).
    """
    ratio = precision.logdet() - prior.P0.logdet()
    distance = (prior.precisions * prior.scatter(theta)).sum()
    return Evidence(log_lik, ratio, distance, 0.5 * precision.logdet_error())


def mode_of_quadratic(
    gradient: Float[Tensor, " p"],
    curvature: Curvature,
    precision: Precision,
    prior: GaussianPrior,
    theta: Float[Tensor, " p"],
) -> Float[Tensor, " p"]:
    """θ_* = m₀ + P⁻¹ (g + H (θ₀ − m₀)), the mode for a log likelihood that is quadratic around θ₀."""
    return prior.mean + precision.solve(gradient + curvature.mv(theta - prior.mean))


def linear_evidence(
    log_lik: Scalar,
    gradient: Float[Tensor, " p"],
    curvature: Curvature,
    precision: Precision,
    prior: GaussianPrior,
    theta: Float[Tensor, " p"],
) -> Evidence:
    """The evidence of the linear model at its own mode θ_* = θ₀ + d:  log p(D | θ_*) = ℓ₀ + gᵀd − ½ dᵀ H d.

    Exact for a Gaussian likelihood with the full H, for any θ₀. Antorán et al. (2022). Cost: one `logdet` and one
    `solve`.
    """
    mode = mode_of_quadratic(gradient, curvature, precision, prior, theta)
    d = mode - theta
    return log_evidence(log_lik + gradient @ d - 0.5 * d @ curvature.mv(d), precision, prior, mode)


def effective_dimension(curvature: Curvature, prior: GaussianPrior) -> Float[Tensor, " g"]:
    """γ_g = P_g − δ_g tr(P⁻¹)_gg, the number of parameters in group g that the data determine.

    Computed as −∂(log det P − log det P₀)/∂ log δ_g, which needs no code per structure.
    """

    def log_det_ratio(log_precisions: Tensor) -> Scalar:
        P0 = GroupedDiagonal(log_precisions.exp(), prior.index)
        return curvature.plus(P0).logdet() - P0.logdet()

    return -_gradient(log_det_ratio, prior.precisions.log())


def effective_dimension_of_parts(
    combine: Callable[[Tensor], Curvature], scales: Float[Tensor, " g"], prior: GaussianPrior
) -> Float[Tensor, " g"]:
    """tr(P⁻¹ c_g H_g) for each dispersion part: the effective dimension of the data with each noise level."""
    return _gradient(lambda log_scales: combine(log_scales.exp()).plus(prior.P0).logdet(), scales.log())


def _gradient(function: Callable[[Tensor], Scalar], at: Tensor) -> Tensor:
    """∂ function / ∂ at; part of the autograd graph if `at` is."""
    if at.requires_grad:
        return torch.autograd.grad(function(at), at, create_graph=True)[0]
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf)[0].detach()
