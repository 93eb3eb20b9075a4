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

_SHORTEST = 1e-6
_ROUNDING = 1e-9  # of the bound, relative


@dataclass(frozen=True, eq=False)
class Belief:
    """A Gaussian over the weights, and what it expects of the data, κ included."""

    theta: Float[Tensor, " p"]  # μ
    curvature: Float[Tensor, "m c c"]  # Λ̃
    factor: Factor
    cov: Float[Tensor, "m c c"]  # V = J P⁻¹ Jᵀ
    moments: Moments
    bound: Elbo


@dataclass(frozen=True, eq=False)
class Family:
    """Everything that is given: the linear model, the entries of P that are kept, the rule for expectations."""

    model: LinearModel
    covariance: Covariance
    expect: Expectation

    def belief(self, theta: Float[Tensor, " p"], curvature: Float[Tensor, "m c c"]) -> Belief:
        return self._believed(theta, curvature, self.covariance.factor(self.model, curvature))

    def _believed(self, theta: Float[Tensor, " p"], curvature: Float[Tensor, "m c c"], factor: Factor) -> Belief:
        model, V = self.model, factor.term_covariances()
        found = self.expect(model.likelihood, model.y, model.outputs(theta), V)
        moments = found.scaled(model.likelihood_scale)
        # tr(P₀ P⁻¹) − P = −tr(P⁻¹ JᵀΛ̃J), so that KL = ½ (|μ − m₀|² + log det P P₀⁻¹ − Σ tr Λ̃ V)
        kl = 0.5 * (model.scatter(theta) + factor.log_det_ratio() - (curvature * V).sum())
        return Belief(theta, curvature, factor, V, moments, Elbo(float(moments.log_lik), float(kl)))

    def gradient(self, belief: Belief) -> Float[Tensor, " p"]:
        """∂ELBO/∂μ = E[Jᵀ κr] − P₀ (μ − m₀)."""
        return self.model.pulled(belief.moments.residual) - self.model.pull(belief.theta)

    def moved(self, belief: Belief, g: Float[Tensor, " p"], rho: float) -> Belief:
        """One natural-gradient step: the precision first, then the mean with it."""
        curvature = torch.lerp(belief.curvature, belief.moments.hessian, rho)
        factor = self.covariance.factor(self.model, curvature)
        step = self.covariance.step(self.model, curvature, factor, g)
        return self._believed(belief.theta + rho * step, curvature, factor)


@dataclass(frozen=True)
class Ascent:
    """How long to ascend. Steps are halved when the bound falls, and lengthened again up to `longest`."""

    longest: float = 1.0
    most_steps: int = 500
    gradient: float = 1e-8  # largest entry, absolute
    curvature: float = 1e-8  # largest change of Λ̃, relative

    def at_most(self, n: int) -> Ascent:
        return replace(self, most_steps=n)


@dataclass(frozen=True, eq=False)
class Ascended:
    """Where the steps ended."""

    belief: Belief
    path: tuple[float, ...]  # ELBO, from the start on
    gradient: float
    converged: bool
    n_steps: int


def ascend(family: Family, start: Belief, ascent: Ascent) -> Ascended:
    """Natural-gradient steps until mean and precision stand still.

    A step has to raise the bound; where rounding decides whether it does, to come closer to rest.
    """
    at, rho, path = start, ascent.longest, [start.bound.total]
    while True:
        g = family.gradient(at)
        largest, change = float(g.abs().max()), _change(at)
        converged = largest <= ascent.gradient and change <= ascent.curvature
        if converged or len(path) > ascent.most_steps or rho < _SHORTEST:
            return Ascended(at, tuple(path), largest, converged, len(path) - 1)
        new = family.moved(at, g, rho)
        gain = new.bound.total - at.bound.total
        unsure = -_ROUNDING * (1 + abs(at.bound.total)) <= gain < 0
        if _distance(new, family.gradient(new)) < _distance(at, g) if unsure else gain >= 0:
            at, rho = new, min(ascent.longest, 1.5 * rho)
            path.append(new.bound.total)
        else:
            rho /= 2


def _change(belief: Belief) -> float:
    """Of Λ̃, still to come; relative."""
    return float((belief.moments.hessian - belief.curvature).abs().max() / belief.curvature.abs().max())


def _distance(belief: Belief, g: Float[Tensor, " p"]) -> float:
    """How far from rest, in the metric of q: gᵀ P⁻¹ g + ½ Σ tr (V (E[κΛ] − Λ̃))²."""
    still = belief.cov @ (belief.moments.hessian - belief.curvature)
    return float(g @ belief.factor.solve(g)) + 0.5 * float((still * still.mT).sum())
