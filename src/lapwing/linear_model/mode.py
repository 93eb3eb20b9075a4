"""The mode θ_* of the linearised network's own posterior, by Newton's method with conjugate gradients.

    θ_* = argmax_θ  κ Σ_n log p(y_n | f_n + J_n (θ − θ̃)) − ½ (θ − m₀)ᵀ P₀ (θ − m₀)

The objective is concave for the usual likelihoods, so there is one mode. It is not the trained θ̃ when training stopped
early, used another weight decay, or had normalisation layers. Antorán et al. (2022), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import FitStatistics
from lapwing.likelihoods import Likelihood, Sites
from lapwing.linear_model.design import Design, Piece
from lapwing.linear_model.direct import Solve
from lapwing.operators import Precision
from lapwing.priors import GaussianPrior
from lapwing.runtime import distributed

Outputs = tuple[Tensor, ...] | None  # h of each piece of the data, (n, T, C); None: the network's own


@dataclass(frozen=True, eq=False)
class Problem:
    """The concave objective and its derivatives. Outputs of the linear model are kept from pass to pass."""

    design: Design
    likelihood: Likelihood
    sites: Sites
    likelihood_scale: float  # κ
    prior: GaussianPrior

    def statistics(self, theta: Tensor, outputs: Outputs) -> FitStatistics:
        """Log likelihood and its gradient where the outputs are h: one pass of reverse mode."""
        n, likelihood = 0, torch.zeros((), dtype=torch.float64, device=theta.device)
        gradients: list[Tensor] = []
        for piece in self.design:
            h = self.outputs_of(piece, outputs, n)
            residuals = self.likelihood.part_residuals(h, piece.y)
            if not gradients:
                gradients = [torch.zeros_like(theta) for _ in residuals]
            for total, r in zip(gradients, residuals, strict=True):
                piece.add_vjp_(total, self._flat(r))
            likelihood = likelihood + self.likelihood.statistics(h, piece.y)
            n += len(h)
        return FitStatistics.over_ranks(FitStatistics(n, likelihood, torch.stack(gradients)) if n else None)

    def gradient(self, theta: Tensor, statistics: FitStatistics) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]]:
        """What the data pull, and what the prior pulls back."""
        scales = self.likelihood_scale * self.likelihood.part_scales().to(theta)
        return scales @ statistics.gradients, (theta - self.prior.mean).mul_(self.prior.P0.diagonal)

    def hessian_pass(self, outputs: Outputs, v: Float[Tensor, " p"]) -> tuple[Float[Tensor, " p"], list[Along]]:
        """(κ Σ Jᵀ Λ(h) J + P₀) v with Λ at the outputs h, and J v itself."""
        total, along, n = torch.zeros_like(v), [], 0
        for piece, moved in self.design.along(v):
            h, q = self.outputs_of(piece, outputs, n), self.sites.split(moved)
            piece.add_vjp_(total, self._flat(self.likelihood.hessian_mv(h, piece.y, q)))
            along.append(Along(h, q, piece.y))
            n += len(h)
        return distributed.total(total).mul_(self.likelihood_scale).addcmul_(self.prior.P0.diagonal, v), along

    def factorised(self, outputs: Outputs) -> Solve | None:
        """v ↦ (κ Σ Jᵀ Λ(h) J + P₀)⁻¹ v by a factorisation, where the data or the parameters are few."""
        direct = self.design.direct(self.sites, self.prior.P0)
        if direct is None:
            return None
        roots, n = [], 0
        for piece in self.design:
            h = self.outputs_of(piece, outputs, n)
            roots.append(self.likelihood.hessian_root(h, piece.y))
            n += len(h)
        return direct.at(self.prior.P0, self.likelihood_scale**0.5 * torch.cat(roots))

    def step_length(self, theta: Tensor, d: Float[Tensor, " p"], along: list[Along], slope: float) -> float:
        """The α that maximises the objective along d; outputs move along a straight line, so no pass is needed."""
        pull = self.prior.P0.diagonal * d
        from_here, stiffness = float((theta - self.prior.mean) @ pull), float(d @ pull)

        def derivatives(alpha: float) -> tuple[float, float]:
            rise, bend = torch.zeros(2, dtype=torch.float64)
            for line in along:
                at = line.h + alpha * line.q
                rise += (self.likelihood.residual(at, line.y) * line.q).sum().cpu()
                bend += (self.likelihood.hessian_mv(at, line.y, line.q) * line.q).sum().cpu()
            from_data = self.likelihood_scale * distributed.total(torch.stack([rise, bend]))
            return float(from_data[0]) - from_here - alpha * stiffness, -float(from_data[1]) - stiffness

        return _root(derivatives, slope)

    def outputs_of(self, piece: Piece, outputs: Outputs, start: int) -> Float[Tensor, "n t c"]:
        """h of the data from `start` on; they may have been cut otherwise when it was found."""
        if outputs is None:
            return self.sites.split(piece.f)
        stop, first, parts = start + len(piece.f), 0, []
        for h in outputs:
            parts.append(h[max(start - first, 0) : max(stop - first, 0)])
            first += len(h)
        return torch.cat(parts)

    def _flat(self, r: Float[Tensor, "n t c"]) -> Float[Tensor, "n k"]:
        return self.sites.join(r).reshape(len(r), -1)


@dataclass(frozen=True, eq=False)
class Along:
    """Outputs h of some data, how they move, and their targets."""

    h: Float[Tensor, "n t c"]
    q: Float[Tensor, "n t c"]
    y: Tensor


@dataclass(frozen=True)
class Effort:
    """When to stop: the gradient relative to what it is made of, and how many passes may be spent."""

    rtol: float
    most_steps: int
    most_products: int  # Hessian products within one Newton step
    over: Callable[[], bool] = field(default=lambda: False, compare=False)  # whether the time is spent


PRECISE = Effort(1e-11, 60, 400)
_MOST_NEAR = 100  # products for a system that a few digits are wanted of
_LAST_RTOL = 1e-4


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
    outputs: tuple[Float[Tensor, "_ t c"], ...] | None = None  # h(θ₀) of the data, piece by piece; None: f


def solve_mode(problem: Problem, start: Expansion, preconditioner: Precision, effort: Effort) -> Expansion:
    """Newton from `start`; each system is solved by conjugate gradients, preconditioned by the posterior's precision.

    With a Gaussian likelihood and the full curvature the preconditioner is the Hessian, and one step is exact. A step
    costs one pass for every product and one for the gradient behind it.
    """
    at, n_products, step = start, 0, 0
    while True:
        from_data, pull = problem.gradient(at.theta, at.statistics)
        g, relative = from_data - pull, _relative(from_data, pull)
        if relative <= effort.rtol or step == effort.most_steps or effort.over():
            break
        # Inexact Newton: a system is solved to a tenth at first, and to more digits as the gradient falls.
        rtol = max(min(0.1, relative), 0.1 * effort.rtol)
        d, along, n = _conjugate_gradients(problem, at, g, preconditioner, rtol, effort.most_products, effort.over)
        slope = float(g @ d)
        if not slope > 0:
            break  # rounding decides: nothing rises any more
        alpha = problem.step_length(at.theta, d, along, slope)
        theta, outputs = torch.add(at.theta, d, alpha=alpha), tuple(line.h + alpha * line.q for line in along)
        at = replace(at, theta=theta, outputs=outputs, statistics=problem.statistics(theta, outputs))
        n_products, step = n_products + n, step + 1
    return replace(at, follows=False, search=Search(relative, step, n_products, relative <= effort.rtol))


def polished(problem: Problem, at: Expansion, preconditioner: Precision) -> Expansion:
    """One Newton step more, at full length, from where a search has met its tolerance: what is left is rounding.

    Where within its tolerance a search ends hangs on the last digits of sums over data. A precision whose group has few
    effective dimensions magnifies that; so a point that others are to find again is taken here.
    """
    assert at.search is not None
    from_data, pull = problem.gradient(at.theta, at.statistics)
    g = from_data - pull
    if not (at.search.converged and bool(g.any())):
        return at
    d, along, n = _conjugate_gradients(problem, at, g, preconditioner, _LAST_RTOL, _MOST_NEAR)
    theta, outputs = at.theta + d, tuple(line.h + line.q for line in along)
    statistics = problem.statistics(theta, outputs)
    relative = _relative(*problem.gradient(theta, statistics))
    search = Search(relative, at.search.n_steps + 1, at.search.n_products + n, converged=True)
    return replace(at, theta=theta, outputs=outputs, statistics=statistics, search=search)


def _relative(from_data: Float[Tensor, " p"], pull: Float[Tensor, " p"]) -> float:
    return float((from_data - pull).norm() / (from_data.norm() + pull.norm() + 1e-300))


def solve_near(
    problem: Problem, at: Expansion, B: Float[Tensor, "m p"], preconditioner: Precision, rtol: float
) -> Float[Tensor, "m p"]:
    """H(θ)⁻¹ b with the linear model's own Hessian at a point: how the mode moves when its gradient changes by b."""
    factorised = problem.factorised(at.outputs)
    if factorised is not None:
        return factorised(B)
    each = (
        _conjugate_gradients(problem, at, b, preconditioner, rtol, _MOST_NEAR)[0] if bool(b.any()) else b for b in B
    )
    return torch.stack(list(each))


def _conjugate_gradients(
    problem: Problem,
    at: Expansion,
    g: Tensor,
    preconditioner: Precision,
    rtol: float,
    most: int,
    over: Callable[[], bool] = lambda: False,
) -> tuple[Float[Tensor, " p"], list[Along], int]:
    """d ≈ H(θ)⁻¹ g to a residual of rtol in the preconditioner's norm, with the outputs' way along it."""
    exactly = problem.design.precise and preconditioner.has_weights
    # A factorisation is the inverse itself: one product, or a second against rounding, meets any tolerance.
    solve = problem.factorised(at.outputs) or (preconditioner.solve if exactly else preconditioner.approximate_solve)
    x, r = torch.zeros_like(g), g.clone()
    along: list[Along] = []
    z = solve(r)
    p, rz, n = z, float(r @ z), 0
    target = rtol**2 * rz
    while n < most:
        n += 1
        Hp, moved = problem.hessian_pass(at.outputs, p)
        bend = float(p @ Hp)
        alpha = rz / bend if bend != 0 else 0.0  # without data g may be so small that its square is zero
        x.add_(p, alpha=alpha)
        r.sub_(Hp, alpha=alpha)
        steps = [replace(line, q=alpha * line.q) for line in moved]
        along = [replace(a, q=a.q + b.q) for a, b in zip(along, steps, strict=True)] if along else steps
        if n == most or over():  # no step is left for another direction
            break
        z = solve(r)
        rz, before = float(r @ z), rz
        if rz <= target:
            break
        p = torch.add(z, p, alpha=rz / before)
    return x, along, n


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
