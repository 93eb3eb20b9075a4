"""Maximise the evidence: Newton's method, or L-BFGS for many variables without closed-form derivatives."""

from __future__ import annotations

from dataclasses import replace

import torch

from lapwing._types import Bool, Float, Scalar, Tensor
from lapwing.posterior import Posterior
from lapwing.tuning.evidence.fixed_point import iterate_fixed_point
from lapwing.tuning.evidence.target import Target, target
from lapwing.tuning.evidence.traced import TracedTarget
from lapwing.tuning.evidence.variables import Variables, ascent_direction
from lapwing.tuning.step import Step, noise_is_free, noise_of, step

MOST_DIFFERENCES = 32  # variables up to which the Hessian is computed by finite differences
_LAST = 1e-3  # largest change of a log in the final step, which excludes flat directions
_LITTLE, _FAR = 1e-4, 1e3  # nats that count as nothing to gain; a step in log precision beyond every bound


GAIN_TOLERANCE = 0.01  # nats; log precisions are then within about a tenth of their standard deviation


def maximise_evidence(posterior: Posterior, *, noise: bool, enough: float = 0.0) -> Posterior:
    """Maximise log Z over log precisions and, if it is to be estimated, log noise.

    Stops when a Newton step would gain less than `enough` nats: gᵀ|H|⁻¹g is the squared distance to the maximum in
    standard deviations of the hyperparameters.

    The curvature at unit noise is fixed; at the linear mode, so is the point of expansion. If determinants are
    stochastic estimates, MacKay's updates are used, which have the same stationary points: they need derivatives only,
    and no line search, which the error of the estimates would mislead.
    """
    if not posterior.curvature.precise:
        return iterate_fixed_point(posterior, noise=noise)
    tune_noise = noise and noise_is_free(posterior)
    with torch.no_grad():
        found = twice_differentiable(posterior, tune_noise, estimates=enough > 0)
        if found is not None:
            return _by_newton(posterior, found, tune_noise, enough)
    return _by_lbfgs(posterior, tune_noise)


def twice_differentiable(posterior: Posterior, tune_noise: bool, *, estimates: bool = False) -> Target | None:
    """The evidence with closed-form derivatives; else with finite differences if variables are few; else None."""
    closed = target(posterior, estimates=estimates)
    n_variables = posterior.prior.P0.n_groups + tune_noise * len(noise_of(posterior))
    if closed is not None or n_variables > MOST_DIFFERENCES:
        return closed
    return TracedTarget(posterior, tune_noise)


def _by_newton(posterior: Posterior, closed: Target, tune_noise: bool, enough: float) -> Posterior:
    """Newton's method on (u, w) with backtracking; see `maximise_evidence` for when it stops."""
    now = Variables.of(posterior, tune_noise)
    value = closed.value(now.u, now.w)
    steps, size = [step(value, now.on(posterior))], 1.0 + posterior.n_data
    for _ in range(200):
        gradient, hessian = closed.derivatives(now.u, now.w)
        free = now.free(gradient)
        move = ascent_direction(gradient, hessian, free)
        endless = _diverging(gradient, move, len(now.u))
        gain = float(gradient @ move)
        if enough and gain < enough and not bool(endless.any()):
            break
        at_rest = bool((gradient[free].abs() <= 1e-10 * size).all()) or gain < 1e-14 * size
        moved, after = now, value
        if not at_rest or bool(endless.any()):
            moved, after = _backtracked(closed, now, torch.where(endless, _FAR, move), value)
        if torch.equal(moved.z, now.z):
            # Values agree to rounding, but gradients have more digits: finish with a full Newton step.
            now = now.moved(torch.where(move.abs() < _LAST, move, 0.0))
            break
        now, value = moved, after
        steps.append(step(value, now.on(posterior)))
    return replace(now.on(posterior), history=(*posterior.history, *steps))


def _diverging(gradient: Float[Tensor, " d"], move: Float[Tensor, " d"], n: int) -> Bool[Tensor, " d"]:
    """Precisions that diverge because the data do not constrain their group: E = E_∞ − a/δ.

    A Newton step multiplies δ by e there, and never converges. The gradient a/δ is all that can still be gained.
    """
    precision = torch.arange(len(move), device=move.device) < n
    return precision & (move > 0.5) & (gradient > 0) & (gradient < _LITTLE)


def _backtracked(closed: Target, now: Variables, move: Tensor, value: Scalar) -> tuple[Variables, Scalar]:
    """Backtracking: the longest of move, move/2, … that does not decrease the evidence, within the bounds."""
    for _ in range(50):
        moved = now.moved(move)
        after = closed.value(moved.u, moved.w)
        if bool(after >= value):
            return moved, after
        move = move / 2
    return now, value


def _by_lbfgs(posterior: Posterior, tune_noise: bool) -> Posterior:
    """L-BFGS with a strong Wolfe line search; bounds are enforced by clamping."""
    start = Variables.of(posterior, tune_noise)
    move = torch.zeros_like(start.low, requires_grad=True)
    steps: list[Step] = []
    optimiser = torch.optim.LBFGS(
        [move], max_iter=200, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        candidate = start.moved(move).on(posterior)
        loss = -candidate.log_evidence()
        loss.backward()
        steps.append(step(-loss.detach(), candidate))
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return replace(start.moved(move.detach()).on(posterior), history=(*posterior.history, *steps))
