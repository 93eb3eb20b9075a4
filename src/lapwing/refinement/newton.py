"""The linear model's mode by Newton's method with exact solves, in weight space or in function space.

    Ψ(θ) = κ Σ log p(y | f + J (θ − θ̃)) − ½ (θ − m₀)ᵀ P₀ (θ − m₀)

is concave for the usual likelihoods. In weight space a step solves with the P × P Hessian. In function space
θ = m₀ + P₀⁻¹ Jᵀ α, and only the kernel K = J P₀⁻¹ Jᵀ between outputs is needed (Rasmussen and Williams, 2006,
section 3.4), which is cheaper if there are fewer outputs than weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.refinement.covariances import FunctionFactor, dense_precision
from lapwing.refinement.model import LinearModel

_ARMIJO = 1e-4  # share of the predicted gain that a step must reach
_SHORTEST = 1e-12  # step length at which the line search gives up
_ROUNDING = 1e-14  # relative gradient that a further step cannot reduce


@dataclass(frozen=True)
class Tolerance:
    """When to stop: by the largest entry of the gradient, absolute, or relative to the prior's term in it."""

    absolute: float = 1e-9
    relative: float = 1e-12
    most_steps: int = 50

    def reached(self, gradient: Tensor, prior_gradient: Tensor) -> bool:
        return float(gradient.abs().max()) <= max(self.absolute, self.relative * float(prior_gradient.abs().max()))

    def improvable(self, gradient: Tensor, prior_gradient: Tensor) -> bool:
        """Whether one more full step would reduce the gradient from the tolerance to rounding error."""
        return self.reached(gradient, prior_gradient) and float(gradient.abs().max()) > _ROUNDING * float(
            prior_gradient.abs().max()
        )


TIGHT = Tolerance()


@dataclass(frozen=True, eq=False)
class Mode:
    """θ_* and the record of the search."""

    theta: Float[Tensor, " p"]
    path: tuple[float, ...]  # Ψ after every step
    converged: bool

    @property
    def n_steps(self) -> int:
        return len(self.path) - 1


def mode_in_weights(model: LinearModel, tolerance: Tolerance = TIGHT) -> Mode:
    """θ ← θ + t (Jᵀ Λ J + P₀)⁻¹ ∇Ψ from the trained weights. Cost of a step: N·C·P² + P³."""
    theta = model.theta

    def value(theta: Tensor) -> float:
        return model.log_lik(model.outputs(theta)) - 0.5 * float(model.scatter(theta))

    path, converged = [value(theta)], False
    while True:
        h = model.outputs(theta)
        prior_gradient = model.prior_gradient(theta)
        g = model.vjp(model.residual(h)) - prior_gradient
        converged = tolerance.reached(g, prior_gradient)
        if converged or len(path) > tolerance.most_steps:
            break
        step = dense_precision(model, model.hessian_root(h)).solve(g)
        t = backtracked(value, theta, step, now=path[-1], slope=float(g @ step))
        if t is None:
            break
        theta = theta + t * step
        path.append(value(theta))
    # Values of Ψ no longer resolve a step, but gradients do: take one more full step.
    if tolerance.improvable(g, prior_gradient):
        theta = theta + dense_precision(model, model.hessian_root(h)).solve(g)
    return Mode(theta, tuple(path), converged)


def mode_in_functions(model: LinearModel, tolerance: Tolerance = TIGHT) -> Mode:
    """The same mode as θ_* = m₀ + P₀⁻¹ Jᵀ α, where α = κ r at the mode. Cost of a step: (N·C)³.

    From outputs u = h − m a step leads to α = b − S B⁻¹ Sᵀ K b with b = κΛ u + κ r, S Sᵀ = κΛ, B = I + Sᵀ K S. Neither
    K nor Λ is inverted, so both may be singular. The first step starts at the network's outputs, which need not
    correspond to any α; if it overshoots, the search starts at α = 0.
    """
    m = model.outputs(model.prior.mean.expand(model.p))

    def moved(alpha: Tensor) -> Float[Tensor, "m c"]:
        return (model.kernel @ alpha.flatten()).reshape(alpha.shape)

    def value(alpha: Tensor) -> float:
        u = moved(alpha)
        return model.log_lik(m + u) - 0.5 * float((alpha * u).sum())

    def stepped(h: Tensor) -> Float[Tensor, "m c"]:
        b = torch.einsum("mcd,md->mc", model.hessian(h), h - m) + model.residual(h)
        return b - FunctionFactor(model, model.hessian_root(h)).dual_solve(moved(b))

    alpha = max((stepped(model.f), torch.zeros_like(model.f)), key=value)
    path, converged = [model.log_lik(model.f) - 0.5 * float(model.scatter(model.theta)), value(alpha)], False
    while True:
        h = m + moved(alpha)
        w = model.residual(h) - alpha
        converged = tolerance.reached(w, alpha)
        if converged or len(path) > tolerance.most_steps:
            break
        step = stepped(h) - alpha
        t = backtracked(value, alpha, step, now=path[-1], slope=float((moved(w) * step).sum()))
        if t is None:
            break
        alpha = alpha + t * step
        path.append(value(alpha))
    if tolerance.improvable(w, alpha):
        alpha = stepped(h)
    return Mode(model.prior.mean + model.vjp(alpha) / model.prior.P0.diagonal, tuple(path), converged)


def backtracked(
    value: Callable[[Tensor], float], at: Tensor, step: Tensor, *, now: float, slope: float
) -> float | None:
    """Backtracking line search: the first of 1, ½, ¼, … with sufficient increase; None if only rounding decides."""
    rounding = 1e-13 * abs(now)
    t = 1.0
    while t > _SHORTEST:
        if value(at + t * step) >= now + _ARMIJO * t * slope - rounding:
            return t
        t /= 2
    return None
