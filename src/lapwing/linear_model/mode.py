"""The mode θ_* of the linearised network's own posterior, by Newton's method with conjugate gradients.

    θ_* = argmax_θ  κ Σ_n log p(y_n | f_n + J_n (θ − θ̃)) − ½ (θ − m₀)ᵀ P₀ (θ − m₀)

The objective is concave for the usual likelihoods, so there is one mode. It is not the trained θ̃ when training stopped
early, used another weight decay, or had normalisation layers. Antorán et al. (2022), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import FitStatistics
from lapwing.likelihoods import Likelihood, Sites
from lapwing.linear_model.design import Design, Piece
from lapwing.operators import Precision
from lapwing.priors import GaussianPrior


@dataclass(frozen=True, eq=False)
class Problem:
    """The concave objective and its derivatives; each verb is one pass over the data."""

    design: Design
    likelihood: Likelihood
    sites: Sites
    likelihood_scale: float  # κ
    prior: GaussianPrior
    theta_map: Float[Tensor, " p"]  # θ̃, where the network was linearised

    def statistics(self, theta: Float[Tensor, " p"]) -> FitStatistics:
        """Log likelihood and its gradient at θ, at unit dispersion."""
        shift, n = theta - self.theta_map, 0
        likelihood: Tensor | float = 0.0
        gradients: list[Tensor] = []
        for piece in self.design:
            h = self._moved(piece, shift)
            residuals = self.likelihood.part_residuals(h, piece.y)
            if not gradients:
                gradients = [torch.zeros_like(theta) for _ in residuals]
            for total, r in zip(gradients, residuals, strict=True):
                piece.add_vjp_(total, self._flat(r))
            likelihood = likelihood + self.likelihood.statistics(h, piece.y)
            n += len(h)
        assert isinstance(likelihood, Tensor)  # a design is never empty
        return FitStatistics(n, likelihood, torch.stack(gradients))

    def value(self, theta: Tensor, statistics: FitStatistics) -> float:
        scatter = (self.prior.P0.diagonal * (theta - self.prior.mean) ** 2).sum()
        return float(self.likelihood_scale * self.likelihood.log_lik(statistics.likelihood) - 0.5 * scatter)

    def gradient(self, theta: Tensor, statistics: FitStatistics) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]]:
        """What the data pull, and what the prior pulls back."""
        from_data = self.likelihood_scale * (self.likelihood.part_scales().to(theta) @ statistics.gradients)
        return from_data, self.prior.P0.diagonal * (theta - self.prior.mean)

    def hessian_mv(self, theta: Tensor, v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """(κ Σ Jᵀ Λ(h) J + P₀) v with Λ at the linear model's own outputs h(θ)."""
        total = torch.zeros_like(v)
        for piece in self.design:
            h, q = self._along(piece, theta - self.theta_map, v)
            piece.add_vjp_(total, self._flat(self.likelihood.hessian_mv(h, piece.y, q)))
        return self.likelihood_scale * total + self.prior.P0.diagonal * v

    def step_length(self, theta: Tensor, d: Float[Tensor, " p"], slope: float) -> float:
        """The α that maximises the objective along d: one pass, because outputs move along a straight line."""
        moved = [(*self._along(piece, theta - self.theta_map, d), piece.y) for piece in self.design]
        pull, stiffness = self.prior.P0.diagonal * d, float((self.prior.P0.diagonal * d**2).sum())

        def derivatives(alpha: float) -> tuple[float, float]:
            first = -float(((theta + alpha * d - self.prior.mean) * pull).sum())
            second = -stiffness
            for h, q, y in moved:
                at = h + alpha * q
                first += self.likelihood_scale * float((self.likelihood.residual(at, y) * q).sum())
                second -= self.likelihood_scale * float((self.likelihood.hessian_mv(at, y, q) * q).sum())
            return first, second

        return _root(derivatives, slope)

    def _moved(self, piece: Piece, shift: Tensor) -> Float[Tensor, "n t c"]:
        """h = f + J (θ − θ̃)."""
        return self.sites.split(piece.f + piece.mv(shift[None])[0] if bool(shift.any()) else piece.f)

    def _along(self, piece: Piece, shift: Tensor, v: Tensor) -> tuple[Float[Tensor, "n t c"], Float[Tensor, "n t c"]]:
        if not bool(shift.any()):
            return self.sites.split(piece.f), self.sites.split(piece.mv(v[None])[0])
        h, q = piece.mv(torch.stack([shift, v]))
        return self.sites.split(piece.f + h), self.sites.split(q)

    def _flat(self, r: Float[Tensor, "n t c"]) -> Float[Tensor, "n k"]:
        return self.sites.join(r).reshape(len(r), -1)


@dataclass(frozen=True)
class Effort:
    """When to stop: the gradient relative to what it is made of, and how many passes may be spent."""

    rtol: float
    most_steps: int
    most_products: int  # Hessian products within one Newton step


PRECISE = Effort(1e-11, 60, 400)
QUICK = Effort(1e-2, 3, 4)


@dataclass(frozen=True)
class Search:
    """How a mode was looked for, and how close to it the search came."""

    relative_gradient: float  # ‖∇‖ / (‖data's pull‖ + ‖prior's pull‖)
    n_steps: int
    n_products: int
    converged: bool


@dataclass(frozen=True, eq=False)
class Expansion:
    """The linear model's log likelihood at a point θ₀, and its gradient there.

    With a Gaussian likelihood and the full H it is the quadratic ℓ₀ + gᵀ(θ − θ₀) − ½ (θ − θ₀)ᵀ H (θ − θ₀), and the mode
    *follows* prior and noise without another look at the data. Otherwise θ₀ is the mode found last, and is held: an
    approximate H would let the quadratic rise without end.
    """

    theta: Float[Tensor, " p"]  # θ₀
    statistics: FitStatistics  # ℓ₀ and g, at unit dispersion
    follows: bool
    search: Search | None = None  # None: θ₀ is the trained θ̃


def solve_mode(
    problem: Problem,
    start: Float[Tensor, " p"],
    preconditioner: Precision,
    effort: Effort,
) -> Expansion:
    """Newton from `start`; each system is solved by conjugate gradients, preconditioned by the posterior's precision.

    With a Gaussian likelihood and the full curvature the preconditioner is the Hessian, and one step is exact.
    """
    theta, n_products = start, 0
    statistics = problem.statistics(theta)
    for step in range(effort.most_steps + 1):
        from_data, pull = problem.gradient(theta, statistics)
        g = from_data - pull
        relative = float(g.norm() / (from_data.norm() + pull.norm() + 1e-300))
        if relative <= effort.rtol or step == effort.most_steps:
            break
        # Inexact Newton: a system is solved to a tenth at first, and to more digits as the gradient falls.
        rtol = max(min(0.1, relative), 0.1 * effort.rtol)
        d, n = _conjugate_gradients(problem, theta, g, preconditioner, rtol, effort.most_products)
        n_products += n
        moved = _accepted(problem, theta, statistics, g, d)
        if moved is None:
            break  # rounding decides: no step raises the objective any more
        theta, statistics = moved
    return Expansion(theta, statistics, False, Search(relative, step, n_products, relative <= effort.rtol))


def _accepted(
    problem: Problem, theta: Tensor, statistics: FitStatistics, g: Tensor, d: Tensor
) -> tuple[Tensor, FitStatistics] | None:
    """The full step when the slope has mostly gone there, else the best one along d; None if nothing is gained."""
    slope = float(g @ d)
    if not slope > 0:
        return None
    before = problem.value(theta, statistics)
    moved = theta + d
    after = problem.statistics(moved)
    left = _slope(problem, moved, after, d)
    # Near the mode the objective is flat to rounding; there the slope alone decides.
    if abs(left) <= 0.5 * slope and problem.value(moved, after) >= before - 1e-12 * abs(before):
        return moved, after
    moved = theta + problem.step_length(theta, d, slope) * d
    after = problem.statistics(moved)
    return (moved, after) if problem.value(moved, after) > before else None


def _slope(problem: Problem, theta: Tensor, statistics: FitStatistics, d: Tensor) -> float:
    from_data, pull = problem.gradient(theta, statistics)
    return float((from_data - pull) @ d)


def _conjugate_gradients(
    problem: Problem, theta: Tensor, g: Tensor, preconditioner: Precision, rtol: float, most: int
) -> tuple[Float[Tensor, " p"], int]:
    """d ≈ H(θ)⁻¹ g to a residual of rtol in the preconditioner's norm."""
    x, r = torch.zeros_like(g), g
    z = preconditioner.solve(r)
    p, rz = z, float(r @ z)
    target = rtol**2 * rz
    n = 0
    while n < most:
        n += 1
        Hp = problem.hessian_mv(theta, p)
        alpha = rz / float(p @ Hp)
        x, r = x + alpha * p, r - alpha * Hp
        z = preconditioner.solve(r)
        rz, before = float(r @ z), rz
        if rz <= target:
            break
        p = z + rz / before * p
    return x, n


def _root(derivatives: Callable[[float], tuple[float, float]], slope: float) -> float:
    """α > 0 with φ'(α) ≈ 0 for a concave φ with φ'(0) = slope > 0: Newton, kept inside a bracket."""
    low, high, alpha = 0.0, float("inf"), 1.0
    for _ in range(60):
        first, second = derivatives(alpha)
        if abs(first) <= 0.05 * slope:
            break
        low, high = (alpha, high) if first > 0 else (low, alpha)
        newton = alpha - first / second if second < 0 else float("inf")
        inside = low < newton < min(high, 10 * alpha)
        alpha = newton if inside else (0.5 * (low + high) if high < float("inf") else 4 * alpha)
    return alpha
