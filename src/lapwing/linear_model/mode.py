"""The mode θ_* of the linearised network's posterior, by Newton's method with conjugate gradients.

    θ_* = argmax_θ  κ Σ_n log p(y_n | f_n + J_n (θ − θ̃)) − ½ (θ − m₀)ᵀ P₀ (θ − m₀)

The objective is concave for the usual likelihoods, so the mode is unique. It differs from the trained weights θ̃ after
early stopping, with another weight decay, or with normalisation layers. Antorán et al. (2022), section 3.
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

Outputs = tuple[Tensor, ...] | None  # outputs h (n, t, c) of each piece of the data; None: those of the network


@dataclass(frozen=True, eq=False)
class Problem:
    """The concave objective and its derivatives. Outputs of the linear model are passed along, not recomputed."""

    design: Design
    likelihood: Likelihood
    sites: Sites
    likelihood_scale: float  # κ
    prior: GaussianPrior

    def statistics(self, theta: Tensor, outputs: Outputs) -> FitStatistics:
        """Log likelihood and its gradient at outputs h: one reverse-mode pass."""
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
        """The two terms of the gradient: κ Σ Jᵀ r of the data, and P₀ (θ − m₀) of the prior, which is subtracted."""
        scales = self.likelihood_scale * self.likelihood.part_scales().to(theta)
        return scales @ statistics.gradients, (theta - self.prior.mean).mul_(self.prior.P0.diagonal)

    def hessian_pass(self, outputs: Outputs, v: Float[Tensor, " p"]) -> tuple[Float[Tensor, " p"], list[OutputLine]]:
        """(κ Σ Jᵀ Λ(h) J + P₀) v with Λ at the outputs h, and the outputs along the line with direction J v."""
        total, lines, n = torch.zeros_like(v), [], 0
        for piece, moved in self.design.with_jvp(v):
            h, q = self.outputs_of(piece, outputs, n), self.sites.split(moved)
            piece.add_vjp_(total, self._flat(self.likelihood.hessian_mv(h, piece.y, q)))
            lines.append(OutputLine(h, q, piece.y))
            n += len(h)
        return distributed.total(total).mul_(self.likelihood_scale).addcmul_(self.prior.P0.diagonal, v), lines

    def factorised(self, outputs: Outputs) -> Solve | None:
        """A function v ↦ (κ Σ Jᵀ Λ(h) J + P₀)⁻¹ v by factorisation, if data or parameters are few; else None."""
        direct = self.design.direct(self.sites, self.prior.P0)
        if direct is None:
            return None
        roots, n = [], 0
        for piece in self.design:
            h = self.outputs_of(piece, outputs, n)
            roots.append(self.likelihood.hessian_root(h, piece.y))
            n += len(h)
        return direct.at(self.prior.P0, self.likelihood_scale**0.5 * torch.cat(roots))

    def step_length(self, theta: Tensor, d: Float[Tensor, " p"], lines: list[OutputLine], slope: float) -> float:
        """Line search: the α that maximises the objective along d. Outputs are linear in α, so it needs no pass."""
        P0_d = self.prior.P0.diagonal * d
        from_here, stiffness = float((theta - self.prior.mean) @ P0_d), float(d @ P0_d)

        def derivatives(alpha: float) -> tuple[float, float]:
            first, curvature = torch.zeros(2, dtype=torch.float64)
            for line in lines:
                at = line.h + alpha * line.q
                first += (self.likelihood.residual(at, line.y) * line.q).sum().cpu()
                curvature += (self.likelihood.hessian_mv(at, line.y, line.q) * line.q).sum().cpu()
            from_data = self.likelihood_scale * distributed.total(torch.stack([first, curvature]))
            return float(from_data[0]) - from_here - alpha * stiffness, -float(from_data[1]) - stiffness

        return _root(derivatives, slope)

    def outputs_of(self, piece: Piece, outputs: Outputs, start: int) -> Float[Tensor, "n t c"]:
        """h of the piece that begins at datum `start`; the pieces of `outputs` may have other boundaries."""
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
class OutputLine:
    """Outputs h + α q of some data along a search direction, q = J d, and their targets."""

    h: Float[Tensor, "n t c"]
    q: Float[Tensor, "n t c"]
    y: Tensor


@dataclass(frozen=True)
class StoppingRule:
    """When to stop: a tolerance for the relative gradient, and limits on steps and products."""

    rtol: float  # of ‖∇‖ / (‖data term‖ + ‖prior term‖)
    most_steps: int
    most_products: int  # Hessian products per Newton step
    over: Callable[[], bool] = field(default=lambda: False, compare=False)  # whether the time budget is used up


PRECISE = StoppingRule(1e-11, 60, 400)
_MOST_NEAR = 100  # products for a system that is solved to a few digits only
_LAST_RTOL = 1e-4


@dataclass(frozen=True)
class Search:
    """Record of a mode search: how far it came, and what it cost."""

    relative_gradient: float  # ‖∇‖ / (‖data term‖ + ‖prior term‖)
    n_steps: int
    n_products: int
    converged: bool


@dataclass(frozen=True, eq=False)
class Expansion:
    """The linear model's log likelihood at a point θ₀, and its gradient there.

    With a Gaussian likelihood and the full H it is the quadratic ℓ₀ + gᵀ(θ − θ₀) − ½ (θ − θ₀)ᵀ H (θ − θ₀), and the
    mode *follows* changes of prior and noise without a pass over the data. Otherwise θ₀ is the last mode found, and is
    held fixed: with an approximate H the quadratic can be unbounded as prior precisions go to zero.
    """

    theta: Float[Tensor, " p"]  # θ₀
    statistics: FitStatistics  # ℓ₀ and g, at unit dispersion
    follows: bool
    search: Search | None = None  # None: θ₀ is θ̃, the trained weights
    outputs: tuple[Float[Tensor, "_ t c"], ...] | None = None  # h(θ₀) of the data, piece by piece; None: f


def solve_mode(problem: Problem, start: Expansion, preconditioner: Precision, stopping: StoppingRule) -> Expansion:
    """Newton's method from `start`. Conjugate gradients solve each system, preconditioned by the posterior's
    precision.

    With a Gaussian likelihood and the full curvature the preconditioner is the Hessian, and one step is exact. A step
    costs one pass for every product, and one for the gradient afterwards.
    """
    at, n_products, step = start, 0, 0
    while True:
        from_data, from_prior = problem.gradient(at.theta, at.statistics)
        g, relative = from_data - from_prior, _relative(from_data, from_prior)
        if relative <= stopping.rtol or step == stopping.most_steps or stopping.over():
            break
        # Inexact Newton: the first system is solved to a tenth, later ones to more digits as the gradient decreases.
        rtol = max(min(0.1, relative), 0.1 * stopping.rtol)
        d, lines, n = _conjugate_gradients(problem, at, g, preconditioner, rtol, stopping.most_products, stopping.over)
        slope = float(g @ d)
        if not slope > 0:
            break  # not an ascent direction: the gradient is rounding error
        alpha = problem.step_length(at.theta, d, lines, slope)
        theta, outputs = torch.add(at.theta, d, alpha=alpha), tuple(line.h + alpha * line.q for line in lines)
        at = replace(at, theta=theta, outputs=outputs, statistics=problem.statistics(theta, outputs))
        n_products, step = n_products + n, step + 1
    return replace(at, follows=False, search=Search(relative, step, n_products, relative <= stopping.rtol))


def polished(problem: Problem, at: Expansion, preconditioner: Precision) -> Expansion:
    """One more full Newton step after a search that has converged; what remains is rounding error.

    Where a search ends within its tolerance depends on the last digits of sums over data, and so on batch sizes or
    ranks. A prior group with few effective dimensions magnifies that. Results that must be reproducible take this
    step.
    """
    assert at.search is not None
    from_data, from_prior = problem.gradient(at.theta, at.statistics)
    g = from_data - from_prior
    if not (at.search.converged and bool(g.any())):
        return at
    d, lines, n = _conjugate_gradients(problem, at, g, preconditioner, _LAST_RTOL, _MOST_NEAR)
    theta, outputs = at.theta + d, tuple(line.h + line.q for line in lines)
    statistics = problem.statistics(theta, outputs)
    relative = _relative(*problem.gradient(theta, statistics))
    search = Search(relative, at.search.n_steps + 1, at.search.n_products + n, converged=True)
    return replace(at, theta=theta, outputs=outputs, statistics=statistics, search=search)


def _relative(from_data: Float[Tensor, " p"], from_prior: Float[Tensor, " p"]) -> float:
    return float((from_data - from_prior).norm() / (from_data.norm() + from_prior.norm() + 1e-300))


def solve_hessian(
    problem: Problem, at: Expansion, B: Float[Tensor, "m p"], preconditioner: Precision, rtol: float
) -> Float[Tensor, "m p"]:
    """H(θ)⁻¹ b for rows b of B, with the linear model's Hessian: how the mode moves when its gradient changes by b."""
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
) -> tuple[Float[Tensor, " p"], list[OutputLine], int]:
    """d ≈ H(θ)⁻¹ g to a residual of rtol in the preconditioner's norm, and the outputs along d."""
    exactly = problem.design.precise and preconditioner.has_weights
    # With a factorisation the preconditioner is the inverse: one product meets any tolerance, a second removes
    # rounding.
    solve = problem.factorised(at.outputs) or (preconditioner.solve if exactly else preconditioner.approximate_solve)
    x, r = torch.zeros_like(g), g.clone()
    lines: list[OutputLine] = []
    z = solve(r)
    p, rz, n = z, float(r @ z), 0
    target = rtol**2 * rz
    while n < most:
        n += 1
        Hp, moved = problem.hessian_pass(at.outputs, p)
        curvature = float(p @ Hp)
        alpha = rz / curvature if curvature != 0 else 0.0  # g may be so small that pᵀHp underflows to zero
        x.add_(p, alpha=alpha)
        r.sub_(Hp, alpha=alpha)
        steps = [replace(line, q=alpha * line.q) for line in moved]
        lines = [replace(a, q=a.q + b.q) for a, b in zip(lines, steps, strict=True)] if lines else steps
        if n == most or over():  # the next direction would not be used
            break
        z = solve(r)
        rz, before = float(r @ z), rz
        if rz <= target:
            break
        p = torch.add(z, p, alpha=rz / before)
    return x, lines, n


def _root(derivatives: Callable[[float], tuple[float, float]], slope: float) -> float:
    """α > 0 with φ'(α) ≈ 0 for a concave φ with φ'(0) = slope > 0: Newton's method, safeguarded by a bracket."""
    low, high, alpha = 0.0, float("inf"), 1.0
    for _ in range(60):
        first, second = derivatives(alpha)
        # 5 % of the initial slope is enough: the next Newton step corrects the rest.
        if abs(first) <= 0.05 * slope:
            break
        low, high = (alpha, high) if first > 0 else (low, alpha)
        newton = alpha - first / second if second < 0 else float("inf")
        inside = low < newton < min(high, 10 * alpha)
        alpha = newton if inside else (0.5 * (low + high) if high < float("inf") else 4 * alpha)
    return alpha
