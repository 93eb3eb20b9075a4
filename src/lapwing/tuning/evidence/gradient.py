"""Evidence ascent: Newton's method, or L-BFGS where the variables are many and derivatives no closed forms."""

from __future__ import annotations

from dataclasses import replace

import torch

from lapwing._types import Bool, Float, Scalar, Tensor
from lapwing.posterior import Posterior
from lapwing.tuning.evidence.fixed_point import iterate_fixed_point
from lapwing.tuning.evidence.target import Target, target
from lapwing.tuning.evidence.traced import TracedTarget
from lapwing.tuning.evidence.variables import Variables, uphill
from lapwing.tuning.step import Step, noise_is_free, noise_of, step

MOST_DIFFERENCES = 32  # variables up to which a Hessian is made of differences
_LAST = 1e-3  # of a log: the last step is short, and none along flat directions
_LITTLE, _FAR = 1e-4, 1e3  # nats; and a log beyond every bound


ROUGH = 0.01  # nats left to gain: log precisions within about a tenth of their own standard deviation


def maximise_evidence(posterior: Posterior, *, noise: bool, enough: float = 0.0) -> Posterior:
    """Maximise log Z over log precisions and, when it is to be estimated, log noise.

    Stops where Newton's step would gain less than `enough` nats: gᵀ|H|⁻¹g is the squared distance to the maximum in
    standard deviations of the hyperparameters.

    The curvature at unit noise never changes; at the linear mode its point of expansion does not either. Where
    determinants are estimates, MacKay's updates find the same stationary points: they need derivatives only, and no
    line search that the error of the estimates would mislead.
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
    """In closed form; else by differences of the gradient, where the variables are few; else None."""
    closed = target(posterior, estimates=estimates)
    n_variables = posterior.prior.P0.n_groups + tune_noise * len(noise_of(posterior))
    if closed is not None or n_variables > MOST_DIFFERENCES:
        return closed
    return TracedTarget(posterior, tune_noise)


def _by_newton(posterior: Posterior, closed: Target, tune_noise: bool, enough: float) -> Posterior:
    now = Variables.of(posterior, tune_noise)
    value = closed.value(now.u, now.w)
    steps, size = [step(value, now.on(posterior))], 1.0 + posterior.n_data
    for _ in range(200):
        gradient, hessian = closed.derivatives(now.u, now.w)
        free = now.free(gradient)
        move = uphill(gradient, hessian, free)
        endless = _rises_without_end(gradient, move, len(now.u))
        gain = float(gradient @ move)
        if enough and gain < enough and not bool(endless.any()):
            break
        at_rest = bool((gradient[free].abs() <= 1e-10 * size).all()) or gain < 1e-14 * size
        moved, after = now, value
        if not at_rest or bool(endless.any()):
            moved, after = _halved(closed, now, torch.where(endless, _FAR, move), value)
        if torch.equal(moved.z, now.z):
            # The value has no digits left to judge a step by, but the gradient has: the last step is Newton's own.
            now = now.moved(torch.where(move.abs() < _LAST, move, 0.0))
            break
        now, value = moved, after
        steps.append(step(value, now.on(posterior)))
    return replace(now.on(posterior), history=(*posterior.history, *steps))


def _rises_without_end(gradient: Float[Tensor, " d"], move: Float[Tensor, " d"], n: int) -> Bool[Tensor, " d"]:
    """Precisions of groups that the data have switched off: with E = E_∞ − a/δ a Newton step is one e-fold, for ever.

    The gradient a/δ is what there is to gain yet.
    """
    precision = torch.arange(len(move), device=move.device) < n
    return precision & (move > 0.5) & (gradient > 0) & (gradient < _LITTLE)


def _halved(closed: Target, now: Variables, move: Tensor, value: Scalar) -> tuple[Variables, Scalar]:
    """The longest of the steps move, move/2, … that does not lower the evidence; the bounds hold."""
    for _ in range(50):
        moved = now.moved(move)
        after = closed.value(moved.u, moved.w)
        if bool(after >= value):
            return moved, after
        move = move / 2
    return now, value


def _by_lbfgs(posterior: Posterior, tune_noise: bool) -> Posterior:
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
