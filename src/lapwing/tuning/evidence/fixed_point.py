"""MacKay's fixed-point updates of prior precisions and noise."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import warn
from lapwing.posterior import Posterior, evidence
from lapwing.tuning.step import noise_is_free, noise_of, step, with_noise, with_resolved_prior


@dataclass(frozen=True)
class _Stopping:
    """When to stop."""

    most_steps: int
    rtol: float  # largest change of a log at which the iteration has converged

    @classmethod
    def of(cls, posterior: Posterior) -> _Stopping:
        """Estimated determinants are reproducible (fixed probes) but have an error, so their tolerance is coarser."""
        return cls(1000, 1e-9) if posterior.curvature.precise else cls(60, 1e-3)


def iterate_fixed_point(posterior: Posterior, *, noise: bool) -> Posterior:
    """MacKay's updates δ_g ← γ_g / ‖θ_* − m₀‖²_g and σ² ← κ SSE / (κ n − γ), iterated to convergence. MacKay (1992).

    θ_* is the linear model's mode, recomputed in every step, or the trained weights in the classic form. Fixed points
    are stationary points of the evidence. A group whose precision reaches a bound is pruned, and excluded from the
    convergence test. If an update changes sign, it has overshot, and later steps are damped.
    """
    rest = _Stopping.of(posterior)
    tuned, change = _iterated(posterior, noise, rest)
    if change >= rest.rtol:
        warn(
            f"The fixed-point updates still moved by {change:.2g} (relative) after {rest.most_steps} steps; "
            'by="evidence" converges faster.',
        )
    return tuned


def take_fixed_point_steps(posterior: Posterior, *, noise: bool) -> Posterior:
    """A few updates only, for alternation with a search for the mode θ_*."""
    return _iterated(posterior, noise, replace(_Stopping.of(posterior), most_steps=5))[0]


def _iterated(posterior: Posterior, noise: bool, rest: _Stopping) -> tuple[Posterior, float]:
    """The posterior after the updates, and the size of the last change."""
    tune_noise = noise and noise_is_free(posterior)
    low, high = posterior.precision_bounds()
    current, steps = posterior, [step(posterior.log_evidence().detach(), posterior)]
    last, damping = torch.zeros_like(posterior.prior.precisions), 1.0
    for _ in range(rest.most_steps):
        wanted = _wanted(current).clamp(min=low, max=high).log() - current.prior.precisions.detach().log()
        # A group whose update turns back by more than a quarter overshoots: halve all steps, then grow them slowly.
        damping = damping / 2 if bool((wanted * last < -0.25 * last**2).any()) else min(1.0, 1.1 * damping)
        precisions = (current.prior.precisions.detach().log() + damping * wanted).exp().clamp(min=low, max=high)
        updated = current.with_prior(current.prior.with_precisions(precisions))
        if tune_noise:
            updated = with_noise(updated, _fixed_point_noise(current))
        change, last = _largest_change(current, updated, low, high), wanted
        current = with_resolved_prior(updated)
        steps.append(step(current.log_evidence().detach(), current))
        if change < rest.rtol:
            break
    return replace(current, history=(*posterior.history, *steps)), change


def _wanted(posterior: Posterior) -> Float[Tensor, " g"]:
    theta = posterior.linearised.theta if posterior.expansion is None else posterior.linear_mode()
    gamma = posterior.effective_dimension().detach()
    return (gamma / posterior.prior.scatter(theta)).nan_to_num(nan=torch.inf)


def _fixed_point_noise(posterior: Posterior) -> Float[Tensor, " g"]:
    """σ² = κ SSE / (κ n − γ) for each noise level, within its bounds."""
    kappa, scales = posterior.likelihood_scale.detach(), posterior.part_scales.detach()
    sse, count = posterior.squared_errors()
    gamma = evidence.effective_dimension_of_parts(posterior.curvature_at, scales, posterior.prior)
    sse = sse.clamp(min=0)  # at the mode a small difference of large sums: rounding may leave it below zero
    left = kappa * count - gamma
    # More effective parameters than targets: the noise is still far too small for MacKay's update, so double it.
    wanted = torch.where(left > 0, (kappa * sse / left.clamp(min=1e-300)).sqrt(), 2 * noise_of(posterior))
    low, high = posterior.noise_bounds()
    return wanted.clamp(min=low, max=high)


def _largest_change(before: Posterior, after: Posterior, low: Tensor, high: Tensor) -> float:
    change = (after.prior.precisions / before.prior.precisions).log().abs()
    inside = (after.prior.precisions > low * 1.0001) & (after.prior.precisions < high / 1.0001)
    moved = [*change[inside].tolist(), *(noise_of(after) / noise_of(before)).log().abs().tolist()]
    return max(moved, default=0.0)
