"""Gaussian variational inference in the linear model, by natural-gradient steps with deterministic expectations.

q = N(μ, P⁻¹) maximises  ELBO = E_q[κ Σ log p(y | h)] − KL(q ‖ prior).  At the optimum

    P = E_q[Jᵀ κΛ J] + P₀  (or its diagonal),    E_q[Jᵀ κr] = P₀ (μ − m₀).

A natural-gradient step of length ρ is Λ̃ ← (1 − ρ) Λ̃ + ρ E[κΛ], then μ ← μ + ρ P⁻¹ (E[Jᵀ κr] − P₀ (μ − m₀)) with the
new precision. Khan et al. (2018), "Fast and scalable Bayesian deep learning by weight-perturbation in Adam".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.linear_model import Elbo
from lapwing.refinement.covariances import Covariance, Factor
from lapwing.refinement.expectations import Expectation, Moments
from lapwing.refinement.model import LinearModel

_SHORTEST = 1e-6  # step length below which the search ends
_ROUNDING = 1e-9  # relative rounding error of the bound


@dataclass(frozen=True, eq=False)
class GaussianIterate:
    """A Gaussian q over the weights, and expectations of the likelihood under it, κ included."""

    theta: Float[Tensor, " p"]  # μ
    curvature: Float[Tensor, "m c c"]  # Λ̃
    factor: Factor
    cov: Float[Tensor, "m c c"]  # V = J P⁻¹ Jᵀ
    moments: Moments
    bound: Elbo


@dataclass(frozen=True, eq=False)
class VariationalProblem:
    """What is fixed during the optimisation: the linear model, the form of the covariance, the integration rule."""

    model: LinearModel
    covariance: Covariance
    expect: Expectation

    def iterate(self, theta: Float[Tensor, " p"], curvature: Float[Tensor, "m c c"]) -> GaussianIterate:
        return self._iterate(theta, curvature, self.covariance.factor(self.model, curvature))

    def _iterate(
        self, theta: Float[Tensor, " p"], curvature: Float[Tensor, "m c c"], factor: Factor
    ) -> GaussianIterate:
        """The Gaussian with mean θ and precision `factor`, with its expectations and ELBO."""
        model, V = self.model, factor.term_covariances()
        found = self.expect(model.likelihood, model.y, model.outputs(theta), V)
        moments = found.scaled(model.likelihood_scale)
        # tr(P₀ P⁻¹) − P = −tr(P⁻¹ JᵀΛ̃J), so that KL = ½ (|μ − m₀|² + log det P P₀⁻¹ − Σ tr Λ̃ V)
        kl = 0.5 * (model.scatter(theta) + factor.log_det_ratio() - (curvature * V).sum())
        return GaussianIterate(theta, curvature, factor, V, moments, Elbo(float(moments.log_lik), float(kl)))

    def gradient(self, iterate: GaussianIterate) -> Float[Tensor, " p"]:
        """∂ELBO/∂μ = E[Jᵀ κr] − P₀ (μ − m₀)."""
        return self.model.vjp(iterate.moments.residual) - self.model.prior_gradient(iterate.theta)

    def moved(self, iterate: GaussianIterate, g: Float[Tensor, " p"], rho: float) -> GaussianIterate:
        """One natural-gradient step: first the precision, then the mean with the new precision."""
        curvature = torch.lerp(iterate.curvature, iterate.moments.hessian, rho)
        factor = self.covariance.factor(self.model, curvature)
        step = self.covariance.step(self.model, curvature, factor, g)
        return self._iterate(iterate.theta + rho * step, curvature, factor)


@dataclass(frozen=True)
class Ascent:
    """Step lengths and stopping rule. Steps are halved when the bound decreases, and grow again up to `longest`."""

    longest: float = 1.0
    most_steps: int = 500
    gradient: float = 1e-8  # tolerance of its largest entry, absolute
    curvature: float = 1e-8  # tolerance of the largest change of Λ̃, relative

    def at_most(self, n: int) -> Ascent:
        return replace(self, most_steps=n)


@dataclass(frozen=True, eq=False)
class AscentResult:
    """The last iterate, and the record of the optimisation."""

    iterate: GaussianIterate
    path: tuple[float, ...]  # ELBO after every step
    gradient: float
    converged: bool
    n_steps: int


def ascend(problem: VariationalProblem, start: GaussianIterate, ascent: Ascent) -> AscentResult:
    """Natural-gradient steps until mean and precision have converged.

    A step must increase the bound. If the change is within rounding error, it must decrease the distance to a
    stationary point instead.
    """
    at, rho, path = start, ascent.longest, [start.bound.total]
    while True:
        g = problem.gradient(at)
        largest, change = float(g.abs().max()), _change(at)
        converged = largest <= ascent.gradient and change <= ascent.curvature
        if converged or len(path) > ascent.most_steps or rho < _SHORTEST:
            return AscentResult(at, tuple(path), largest, converged, len(path) - 1)
        new = problem.moved(at, g, rho)
        gain = new.bound.total - at.bound.total
        # A decrease within rounding error of the bound is neither a gain nor a loss.
        unsure = -_ROUNDING * (1 + abs(at.bound.total)) <= gain < 0
        if _distance(new, problem.gradient(new)) < _distance(at, g) if unsure else gain >= 0:
            at, rho = new, min(ascent.longest, 1.5 * rho)
            path.append(new.bound.total)
        else:
            rho /= 2


def _change(iterate: GaussianIterate) -> float:
    """Largest entry of the next change of Λ̃, relative to Λ̃."""
    return float((iterate.moments.hessian - iterate.curvature).abs().max() / iterate.curvature.abs().max())


def _distance(iterate: GaussianIterate, g: Float[Tensor, " p"]) -> float:
    """Squared distance from a stationary point in the metric of q: gᵀ P⁻¹ g + ½ Σ tr (V (E[κΛ] − Λ̃))²."""
    still = iterate.cov @ (iterate.moments.hessian - iterate.curvature)
    return float(g @ iterate.factor.solve(g)) + 0.5 * float((still * still.mT).sum())
