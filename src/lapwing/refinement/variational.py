"""Gaussian variational inference in the linear model, by natural-gradient steps with deterministic expectations.

q = N(μ, P⁻¹) maximises  ELBO = E_q[κ Σ log p(y | h)] − KL(q ‖ prior).  At the optimum

    P = E_q[Jᵀ κΛ J] + P₀  (or its diagonal),    E_q[Jᵀ κr] = P₀ (μ − m₀).

A natural-gradient step of length ρ is Λ̃ ← (1 − ρ) Λ̃ + ρ E[κΛ], then μ ← μ + ρ P⁻¹ (E[Jᵀ κr] − P₀ (μ − m₀)) with the
new precision. Khan et al. (2018), "Fast and scalable Bayesian deep learning by weight-perturbation in Adam".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.linear_model import Elbo
from lapwing.operators import Precision
from lapwing.refinement.covariances import Covariance, term_covariances
from lapwing.refinement.expectations import Expectation, Moments
from lapwing.refinement.model import LinearModel

_SHORTEST = 1e-6
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Belief:
    """A Gaussian over the weights, and what it expects of the data, κ included."""

    theta: Float[Tensor, " p"]  # μ
    curvature: Float[Tensor, "m c c"]  # Λ̃
    precision: Precision
    moments: Moments
    bound: Elbo


@dataclass(frozen=True, eq=False)
class Family:
    """Everything that is given: the linear model, the entries of P that are kept, the rule for expectations."""

    model: LinearModel
    covariance: Covariance
    expect: Expectation

    def belief(
        self, theta: Float[Tensor, " p"], curvature: Float[Tensor, "m c c"], precision: Precision | None = None
    ) -> Belief:
        model = self.model
        if precision is None:
            precision = self.covariance.precision(model, curvature)
        V, kappa = term_covariances(model, precision), model.likelihood_scale
        found = self.expect(model.likelihood, model.y, model.outputs(theta), V)
        moments = Moments(kappa * found.log_lik, kappa * found.residual, kappa * found.hessian)
        # tr(P₀ P⁻¹) − P = −tr(P⁻¹ JᵀΛ̃J), so that KL = ½ (|μ − m₀|² + log det P P₀⁻¹ − Σ tr Λ̃ V)
        ratio = self.covariance.log_det_ratio(precision, model)
        kl = 0.5 * (model.scatter(theta) + ratio - (curvature * V).sum())
        return Belief(theta, curvature, precision, moments, Elbo(float(moments.log_lik), float(kl)))

    def gradient(self, belief: Belief) -> Float[Tensor, " p"]:
        """∂ELBO/∂μ = E[Jᵀ κr] − P₀ (μ − m₀)."""
        return self.model.pulled(belief.moments.residual) - self.model.pull(belief.theta)

    def moved(self, belief: Belief, g: Float[Tensor, " p"], rho: float) -> Belief:
        """One natural-gradient step: the precision first, then the mean with it."""
        curvature = torch.lerp(belief.curvature, belief.moments.hessian, rho)
        precision = self.covariance.precision(self.model, curvature)
        step = self.covariance.step(self.model, curvature, precision, g)
        return self.belief(belief.theta + rho * step, curvature, precision)


@dataclass(frozen=True)
class Ascent:
    """How long to climb. Steps are halved when the bound falls, and lengthened again up to `longest`."""

    longest: float = 1.0
    most_steps: int = 500
    gradient: float = 1e-8  # largest entry, absolute
    curvature: float = 1e-8  # largest change of Λ̃, relative


@dataclass(frozen=True, eq=False)
class Climbed:
    """Where the steps ended."""

    belief: Belief
    path: tuple[float, ...]  # ELBO, from the start on
    gradient: float
    converged: bool
    n_steps: int


def climb(family: Family, start: Belief, ascent: Ascent) -> Climbed:
    """Natural-gradient steps until mean and precision stand still."""
    at, rho, path = start, ascent.longest, [start.bound.total]
    while True:
        g = family.gradient(at)
        largest, change = _distances(at, g)
        converged = largest <= ascent.gradient and change <= ascent.curvature
        if converged or len(path) > ascent.most_steps or rho < _SHORTEST:
            return Climbed(at, tuple(path), largest, converged, len(path) - 1)
        new = family.moved(at, g, rho)
        if _better(family, at, new, (largest, change)):
            at, rho = new, min(ascent.longest, 1.5 * rho)
            path.append(new.bound.total)
        else:
            rho /= 2


def _distances(belief: Belief, g: Float[Tensor, " p"]) -> tuple[float, float]:
    """The largest entry of the gradient, and of the change of Λ̃ that is still to come."""
    change = (belief.moments.hessian - belief.curvature).abs().max() / belief.curvature.abs().max()
    return float(g.abs().max()), float(change)


def _better(family: Family, old: Belief, new: Belief, distances: tuple[float, float]) -> bool:
    """A higher bound; or, where rounding or sampling decides, a point closer to rest."""
    gain = new.bound.total - old.bound.total
    if gain >= 0:
        return True
    if not family.expect.sampled and gain < -_ROUNDING * (1 + abs(old.bound.total)):
        return False
    return all(a <= b for a, b in zip(_distances(new, family.gradient(new)), distances, strict=True))
