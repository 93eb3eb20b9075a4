"""Variational steps as published: one draw of the weights per step, fixed length, fixed number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing.posterior.sampling import weight_deviations
from lapwing.refinement.variational import AscentResult, GaussianIterate, VariationalProblem


@dataclass(frozen=True)
class SampledSteps:
    """Immer, Korzepa and Bauer (2021): 250 steps of length 1e-2 (full) or 1e-3 (diagonal); they do not converge."""

    rho: float
    n_steps: int

    def at_most(self, n: int) -> SampledSteps:
        return replace(self, n_steps=min(n, self.n_steps))


def take_steps(
    problem: VariationalProblem, start: GaussianIterate, steps: SampledSteps, *, generator: torch.Generator
) -> AscentResult:
    """At a draw θ_s ~ q: Λ̃ ← (1 − ρ) Λ̃ + ρ κΛ(θ_s), then μ ← μ + ρ P⁻¹ (Jᵀ κr(θ_s) − P₀ (μ − m₀))."""
    model, theta, curvature = problem.model, start.theta, start.curvature
    precision = problem.covariance.precision(model, curvature)
    for _ in range(steps.n_steps):
        deviation = weight_deviations(precision, 1, generator=generator, device=theta.device)[0]
        h = model.outputs(theta + deviation)
        curvature = torch.lerp(curvature, model.hessian(h), steps.rho)
        precision = problem.covariance.precision(model, curvature)
        theta = theta + steps.rho * precision.solve(model.vjp(model.residual(h)) - model.prior_gradient(theta))
    end = problem.iterate(theta, curvature)
    largest = float(problem.gradient(end).abs().max())
    return AscentResult(end, (start.bound.total, end.bound.total), largest, False, steps.n_steps)
