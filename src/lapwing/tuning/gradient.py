"""Evidence ascent: Newton's method where the derivatives are closed forms, else L-BFGS."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.posterior import Posterior
from lapwing.tuning.fixed_point import iterate_fixed_point
from lapwing.tuning.step import Step, at, log_bounds, noise_is_free, noise_of, step, with_noise
from lapwing.tuning.target import Target, target


def maximise_evidence(posterior: Posterior, *, noise: bool) -> Posterior:
    """Maximise log Z over log precisions and, when it is to be estimated, log noise.

    The curvature at unit noise never changes; at the linear mode its point of expansion does not either. Where
    determinants are estimates, MacKay's updates find the same stationary points: they need derivatives only, and no
    line search that the error of the estimates would mislead.
    """
    if not posterior.curvature.precise:
        return iterate_fixed_point(posterior, noise=noise)
    tune_noise = noise and noise_is_free(posterior)
    closed = target(posterior)
    return _by_lbfgs(posterior, tune_noise) if closed is None else _by_newton(posterior, closed, tune_noise)


@dataclass(frozen=True, eq=False)
class _Variables:
    """Where the ascent stands: u = log δ within bounds, w = log c, and which of them may move."""

    u: Float[Tensor, " g"]
    w: Scalar
    low: Float[Tensor, " d"]  # of (u, w)
    high: Float[Tensor, " d"]
    tune_noise: bool

    @classmethod
    def of(cls, posterior: Posterior, tune_noise: bool) -> _Variables:
        u, w = posterior.prior.precisions.detach().log(), posterior.part_scales.detach().log()[0]
        low, high = log_bounds(posterior)
        # c = κ/σ²; without a noise to tune, w stays where it is.
        least, most = (w[None], w[None]) if not tune_noise else _log_scale_bounds(posterior)
        bounded = cls(u, w, torch.cat([low, least]), torch.cat([high, most]), tune_noise)
        return bounded.moved(torch.zeros_like(bounded.low))

    def moved(self, move: Float[Tensor, " d"]) -> _Variables:
        z = torch.cat([self.u, self.w[None]]) + move
        z = torch.minimum(torch.maximum(z, self.low), self.high)
        return replace(self, u=z[:-1], w=z[-1])

    def free(self, gradient: Float[Tensor, " d"]) -> Tensor:
        """Variables that are not fixed, and not held at a bound by the gradient."""
        z = torch.cat([self.u, self.w[None]])
        held = ((z <= self.low) & (gradient < 0)) | ((z >= self.high) & (gradient > 0))
        held[-1] |= not self.tune_noise
        return ~held


def _by_newton(posterior: Posterior, closed: Target, tune_noise: bool) -> Posterior:
    now = _Variables.of(posterior, tune_noise)
    value = closed.value(now.u, now.w)
    steps, size = [step(value, _posterior_at(posterior, now))], 1.0 + posterior.n_data
    for _ in range(200):
        gradient, hessian = closed.derivatives(now.u, now.w)
        free = now.free(gradient)
        if bool((gradient[free].abs() <= 1e-10 * size).all()):
            break
        move = _uphill(gradient, hessian, free)
        moved, after = _halved(closed, now, move, value)
        if torch.equal(moved.u, now.u) and bool(moved.w == now.w):
            break
        if float(gradient @ move) < 1e-14 * size:  # nats to be gained yet
            break
        now, value = moved, after
        steps.append(step(value, _posterior_at(posterior, now)))
    return replace(_posterior_at(posterior, now), history=(*posterior.history, *steps))


def _log_scale_bounds(posterior: Posterior) -> tuple[Float[Tensor, 1], Float[Tensor, 1]]:
    kappa = posterior.likelihood_scale.detach()
    low, high = posterior.noise_bounds()
    return (kappa / high**2).log(), (kappa / low**2).log()


def _posterior_at(posterior: Posterior, now: _Variables) -> Posterior:
    return at(posterior, now.u.exp(), now.w.exp()[None] if now.tune_noise else None)


def _uphill(gradient: Tensor, hessian: Tensor, free: Tensor) -> Float[Tensor, " d"]:
    """−|H|⁻¹ reversed in sign: Newton's step where E is concave, and away from saddles where it is not."""
    move = torch.zeros_like(gradient)
    values, V = torch.linalg.eigh(hessian[free][:, free])
    curvature = values.abs().clamp(min=1e-12 * float(values.abs().max()) + 1e-300)
    move[free] = V @ ((V.T @ gradient[free]) / curvature)
    return move.clamp(-4, 4)


def _halved(closed: Target, now: _Variables, move: Tensor, value: Scalar) -> tuple[_Variables, Scalar]:
    """The longest of the steps move, move/2, … that does not lower the evidence; the bounds hold."""
    for _ in range(50):
        moved = now.moved(move)
        after = closed.value(moved.u, moved.w)
        if bool(after >= value):
            return moved, after
        move = move / 2
    return now, value


def _by_lbfgs(posterior: Posterior, tune_noise: bool) -> Posterior:
    low, high = log_bounds(posterior)
    log_precisions = posterior.prior.precisions.detach().log().clone().requires_grad_()
    log_noise = noise_of(posterior).log().clone().requires_grad_() if tune_noise else None
    variables = [log_precisions] if log_noise is None else [log_precisions, log_noise]
    steps: list[Step] = []

    def current() -> Posterior:
        bounded = torch.minimum(torch.maximum(log_precisions, low), high)
        candidate = posterior.with_prior(posterior.prior.with_precisions(bounded.exp()))
        return candidate if log_noise is None else with_noise(candidate, bounded_noise(log_noise))

    def bounded_noise(log_noise: Tensor) -> Tensor:
        least, most = posterior.noise_bounds()
        return torch.minimum(torch.maximum(log_noise.exp(), least), most)

    optimiser = torch.optim.LBFGS(
        variables, max_iter=200, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        candidate = current()
        loss = -candidate.log_evidence()
        loss.backward()
        steps.append(step(-loss.detach(), candidate))
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    final = current()
    tuned = posterior.with_prior(posterior.prior.with_precisions(final.prior.precisions.detach()))
    if log_noise is not None:
        tuned = with_noise(tuned, bounded_noise(log_noise.detach()))
    return replace(tuned, history=(*posterior.history, *steps))
