"""Laplace refinement: the mean moves to the mode of the linear model, and the curvature is evaluated at its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import Empirical
from lapwing.likelihoods import Gaussian, Sites
from lapwing.linear_model import (
    Expansion,
    Problem,
    Refinement,
    Search,
    StoppingRule,
    StoredDesign,
    StoredPiece,
    design,
    polished,
    solve_mode,
)
from lapwing.posterior import Posterior, Readout
from lapwing.refinement.curvature import reestimated_at
from lapwing.refinement.model import LinearModel, as_rows, check_number, gathered
from lapwing.refinement.newton import Mode, mode_in_functions, mode_in_weights
from lapwing.refinement.passes import CountedPasses
from lapwing.runtime import distributed

_MOST_SOLVED = 1500  # weights or outputs, whichever are fewer, largest side of a system that is factorised
_PRECISE = StoppingRule(1e-11, 100, 400)
_STREAMED = StoppingRule(1e-6, 30, 60)  # float32 products have about seven digits


@dataclass(frozen=True)
class Adam:
    """Full-batch Adam on the summed objective from the trained weights, for a fixed number of steps (not to
    convergence)."""

    lr: float
    n_steps: int


@dataclass(frozen=True, eq=False)
class Found:
    """θ_*, the statistics there that the evidence needs, and the record of the search."""

    theta: Float[Tensor, " p"]
    expansion: Expansion
    path: tuple[float, ...]
    gradient_before: float
    gradient: float
    converged: bool
    n_steps: int


def refine_laplace(
    posterior: Posterior, source: CountedPasses, most_floats: int, adam: Adam | None = None
) -> Posterior:
    """N(θ_*, P⁻¹) with P = H + P₀ in the posterior's own structure, H at the outputs f + J (θ_* − θ̃).

    θ_* is the mode of the exact objective for every structure. Newton's method solves its systems by factorisation if
    J fits into memory and has a small side, else by conjugate gradients. `adam` runs the published procedure instead.
    """
    found = _found(posterior, source, most_floats, adam)
    shift = found.theta - posterior.linearised.theta
    curved = posterior if _constant_curvature(posterior) else reestimated_at(posterior, source, shift)
    report = Refinement(
        "laplace",
        found.path,
        found.gradient_before,
        found.gradient,
        found.converged,
        found.n_steps,
        min(distributed.gathered(source.n)),  # a rank without data may count more
    )
    return replace(curved, expansion=found.expansion, readout=Readout(shift), refinement=report)


def _constant_curvature(posterior: Posterior) -> bool:
    """Whether Λ does not depend on the outputs: a Gaussian likelihood, unless the Fisher uses observed residuals."""
    return isinstance(posterior.likelihood, Gaussian) and not isinstance(posterior.fisher, Empirical)


def _found(posterior: Posterior, source: CountedPasses, most_floats: int, adam: Adam | None) -> Found:
    """θ_* by the solver that memory and sizes allow."""
    start = Expansion(posterior.linearised.theta, posterior.estimate.statistics, follows=False)
    if (
        not distributed.is_distributed()
        and posterior.n_data * posterior.linearised.k * posterior.layout.p <= most_floats
    ):
        model = gathered(posterior, source)
        return mode_in_memory(model, posterior) if adam is None else _by_adam(_problem(model), posterior, start, adam)
    # Ranks store at most J of their own data, and all-reduce products with it.
    data = design(posterior.linearised, source, n=posterior.n_data, most_floats=most_floats)
    if isinstance(data, StoredDesign):
        seen = torch.tensor(sum(len(piece.f) for piece in data.pieces))
        check_number(int(distributed.total(seen)), posterior.n_data)
    kappa = float(posterior.likelihood_scale.detach())
    problem = Problem(data, posterior.likelihood, posterior.sites, kappa, posterior.prior)
    if adam is not None:
        return _by_adam(problem, posterior, start, adam)
    return _by_conjugate_gradients(problem, posterior, start)


def mode_in_memory(model: LinearModel, posterior: Posterior) -> Found:
    """θ_* from a Jacobian in memory: by factorisation, or by conjugate gradients if both sides are large."""
    if min(model.p, model.n_outputs) <= _MOST_SOLVED:
        return mode_by_newton(model)
    start = Expansion(model.theta, model.statistics(model.f), follows=False)
    return _by_conjugate_gradients(_problem(model), posterior, start)


def mode_by_newton(model: LinearModel) -> Found:
    """In weight space or function space, whichever is smaller."""
    solve: Callable[[LinearModel], Mode] = mode_in_functions if model.n_outputs < model.p else mode_in_weights
    mode = solve(model)
    h = model.outputs(mode.theta)
    before = model.vjp(model.residual(model.f)) - model.prior_gradient(model.theta)
    after = model.vjp(model.residual(h)) - model.prior_gradient(mode.theta)
    prior_gradient = model.prior_gradient(mode.theta)
    relative = float(after.norm() / (2 * prior_gradient.norm() + 1e-300))
    search = Search(relative, mode.n_steps, 0, mode.converged)
    expansion = Expansion(mode.theta, model.statistics(h), follows=False, search=search)
    gradients = float(before.abs().max()), float(after.abs().max())
    return Found(mode.theta, expansion, mode.path, *gradients, mode.converged, mode.n_steps)


def _problem(model: LinearModel) -> Problem:
    """The same model with every likelihood term as a datum of its own."""
    data = StoredDesign((StoredPiece(model.f, model.y[:, None], model.J, as_rows(model.J)),), model.n * model.p)
    return Problem(data, model.likelihood, Sites((model.f.shape[1],)), model.likelihood_scale, model.prior)


def _by_conjugate_gradients(problem: Problem, posterior: Posterior, start: Expansion) -> Found:
    precise = problem.design.precise or posterior.dtype == torch.float64
    stopping = _PRECISE if precise else _STREAMED
    expansion = solve_mode(problem, start, posterior.precision, stopping)
    expansion = polished(problem, expansion, posterior.precision) if precise else expansion
    search = expansion.search
    assert search is not None
    return _described(problem, posterior, start, expansion, search.converged, search.n_steps)


def _by_adam(problem: Problem, posterior: Posterior, start: Expansion, adam: Adam) -> Found:
    """The published procedure: full-batch Adam on the negative log joint density."""
    theta = start.theta.clone()
    optimiser = torch.optim.Adam([theta], lr=adam.lr)
    statistics = start.statistics
    for _ in range(adam.n_steps):
        from_data, prior_gradient = problem.gradient(theta, statistics)
        theta.grad = prior_gradient - from_data
        optimiser.step()
        outputs = _outputs(problem, theta - start.theta)
        statistics = problem.statistics(theta, outputs)
    expansion = replace(start, theta=theta, statistics=statistics)
    from_data, prior_gradient = problem.gradient(theta, statistics)
    relative = float((from_data - prior_gradient).norm() / (from_data.norm() + prior_gradient.norm() + 1e-300))
    expansion = replace(expansion, search=Search(relative, adam.n_steps, 0, False))
    return _described(problem, posterior, start, expansion, False, adam.n_steps)


def _outputs(problem: Problem, shift: Float[Tensor, " p"]) -> tuple[Float[Tensor, "_ t c"], ...]:
    return tuple(problem.sites.split(piece.f + piece.mv(shift[None])[0]) for piece in problem.design)


def _described(
    problem: Problem, posterior: Posterior, start: Expansion, end: Expansion, converged: bool, n_steps: int
) -> Found:
    n = posterior.n_data
    path, gradients = [], []
    for at in (start, end):
        log_lik = problem.likelihood_scale * float(problem.likelihood.log_lik(at.statistics.likelihood))
        path.append(log_lik - 0.5 * float((problem.prior.precisions * problem.prior.scatter(at.theta)).sum()))
        from_data, prior_gradient = problem.gradient(at.theta, at.statistics)
        gradients.append(float((from_data - prior_gradient).abs().max()))
    # Streamed data are only counted by now; stored data were counted when they were read.
    if not problem.design.precise:
        check_number(end.statistics.n, n)
    expansion = replace(end, outputs=None, statistics=replace(end.statistics, n=n))
    return Found(end.theta, expansion, tuple(path), gradients[0], gradients[1], converged, n_steps)
