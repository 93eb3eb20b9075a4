"""The variational steps as published: one draw of the weights per step, a fixed length, a fixed number of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing.posterior.sampling import weight_deviations
from lapwing.refinement.variational import Ascended, Belief, Family


@dataclass(frozen=True)
class SampledSteps:
    """Immer, Korzepa and Bauer (2021): 250 steps of length 1e-2 (full) or 1e-3 (diagonal), which do not converge."""

    rho: float
    n_steps: int

    def at_most(self, n: int) -> SampledSteps:
        return replace(self, n_steps=min(n, self.n_steps))


def take_steps(family: Family, start: Belief, steps: SampledSteps, *, generator: torch.Generator) -> Ascended:
    """At a draw θ_s: Λ̃ ← (1 − ρ) Λ̃ + ρ κΛ(θ_s), then μ ← μ + ρ P⁻¹ (Jᵀ κr(θ_s) − P₀ (μ − m₀))."""
    model, theta, curvature = family.model, start.theta, start.curvature
    precision = family.covariance.precision(model, curvature)
    for _ in range(steps.n_steps):
        deviation = weight_deviations(precision, 1, generator=generator, device=theta.device)[0]
        h = model.outputs(theta + deviation)
        curvature = torch.lerp(curvature, model.hessian(h), steps.rho)
        precision = family.covariance.precision(model, curvature)
        theta = theta + steps.rho * precision.solve(model.pulled(model.residual(h)) - model.pull(theta))
    end = family.belief(theta, curvature)
    largest = float(family.gradient(end).abs().max())
    return Ascended(end, (start.bound.total, end.bound.total), largest, False, steps.n_steps)
