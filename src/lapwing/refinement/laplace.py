"""Laplace refinement: the posterior's mean at the linear model's own mode, its curvature at the outputs there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import Empirical
from lapwing.likelihoods import Gaussian, Sites
from lapwing.linear_model import (
    Effort,
    Expansion,
    Problem,
    Refinement,
    Search,
    StoredDesign,
    StoredPiece,
    design,
    polished,
    solve_mode,
)
from lapwing.posterior import Posterior, Readout
from lapwing.refinement.curvature import curved_at
from lapwing.refinement.model import LinearModel, as_rows, check_number, gathered
from lapwing.refinement.newton import Mode, mode_in_functions, mode_in_weights
from lapwing.refinement.passes import Passes
from lapwing.runtime import distributed

_MOST_SOLVED = 1500  # weights or outputs, whichever are fewer, of systems that are solved by factorisation
_PRECISE = Effort(1e-11, 100, 400)
_STREAMED = Effort(1e-6, 30, 60)  # without float64 the network's own products have seven digits at most


@dataclass(frozen=True)
class Adam:
    """Full-batch Adam on the summed objective from the trained weights, a fixed number of steps: not converged."""

    lr: float
    n_steps: int


@dataclass(frozen=True, eq=False)
class Found:
    """θ_* with what the evidence needs to know there, and how it was reached."""

    theta: Float[Tensor, " p"]
    expansion: Expansion
    path: tuple[float, ...]
    gradient_before: float
    gradient: float
    converged: bool
    n_steps: int


def refine_laplace(posterior: Posterior, source: Passes, most_floats: int, adam: Adam | None = None) -> Posterior:
    """N(θ_*, P⁻¹) with P = H + P₀ in the posterior's own structure, H at the outputs f + J (θ_* − θ̃).

    θ_* is the mode of the true objective whatever the structure is: Newton with exact solves where J fits into memory
    and either side is small, with conjugate gradients elsewhere. `adam` takes the published way instead.
    """
    found = _found(posterior, source, most_floats, adam)
    shift = found.theta - posterior.linearised.theta
    curved = posterior if _constant_curvature(posterior) else curved_at(posterior, source, shift)
    report = Refinement(
        "laplace",
        found.path,
        found.gradient_before,
        found.gradient,
        found.converged,
        found.n_steps,
        min(distributed.gathered(source.n)),  # a rank without data is through with them sooner
    )
    return replace(curved, expansion=found.expansion, readout=Readout(shift), refinement=report)


def _constant_curvature(posterior: Posterior) -> bool:
    """A Gaussian's Λ does not depend on the outputs; its observed residuals do."""
    return isinstance(posterior.likelihood, Gaussian) and not isinstance(posterior.fisher, Empirical)


def _found(posterior: Posterior, source: Passes, most_floats: int, adam: Adam | None) -> Found:
    start = Expansion(posterior.linearised.theta, posterior.estimate.statistics, follows=False)
    if (
        not distributed.is_distributed()
        and posterior.n_data * posterior.linearised.k * posterior.layout.p <= most_floats
    ):
        model = gathered(posterior, source)
        return found_in_memory(model, posterior) if adam is None else _by_adam(_problem(model), posterior, start, adam)
    # Ranks keep J of their own data at most, and sum products with it.
    data = design(posterior.linearised, source, n=posterior.n_data, most_floats=most_floats)
    if isinstance(data, StoredDesign):
        seen = torch.tensor(sum(len(piece.f) for piece in data.pieces))
        check_number(int(distributed.total(seen)), posterior.n_data)
    kappa = float(posterior.likelihood_scale.detach())
    problem = Problem(data, posterior.likelihood, posterior.sites, kappa, posterior.prior)
    if adam is not None:
        return _by_adam(problem, posterior, start, adam)
    return _by_conjugate_gradients(problem, posterior, start)


def found_in_memory(model: LinearModel, posterior: Posterior) -> Found:
    """θ_* where the Jacobian is at hand: by factorisation, or by conjugate gradients where both sides are large."""
    if min(model.p, model.n_outputs) <= _MOST_SOLVED:
        return found_by_newton(model)
    start = Expansion(model.theta, model.statistics(model.f), follows=False)
    return _by_conjugate_gradients(_problem(model), posterior, start)


def found_by_newton(model: LinearModel) -> Found:
    """In weight space or function space, whichever is smaller."""
    solve: Callable[[LinearModel], Mode] = mode_in_functions if model.n_outputs < model.p else mode_in_weights
    mode = solve(model)
    h = model.outputs(mode.theta)
    before = model.pulled(model.residual(model.f)) - model.pull(model.theta)
    after = model.pulled(model.residual(h)) - model.pull(mode.theta)
    pull = model.pull(mode.theta)
    relative = float(after.norm() / (2 * pull.norm() + 1e-300))
    search = Search(relative, mode.n_steps, 0, mode.converged)
    expansion = Expansion(mode.theta, model.statistics(h), follows=False, search=search)
    gradients = float(before.abs().max()), float(after.abs().max())
    return Found(mode.theta, expansion, mode.path, *gradients, mode.converged, mode.n_steps)


def _problem(model: LinearModel) -> Problem:
    """Every term as a datum of its own."""
    data = StoredDesign((StoredPiece(model.f, model.y[:, None], model.J, as_rows(model.J)),), model.n * model.p)
    return Problem(data, model.likelihood, Sites((model.f.shape[1],)), model.likelihood_scale, model.prior)


def _by_conjugate_gradients(problem: Problem, posterior: Posterior, start: Expansion) -> Found:
    precise = problem.design.precise or posterior.dtype == torch.float64
    effort = _PRECISE if precise else _STREAMED
    expansion = solve_mode(problem, start, posterior.precision, effort)
    expansion = polished(problem, expansion, posterior.precision) if precise else expansion
    search = expansion.search
    assert search is not None
    return _described(problem, posterior, start, expansion, search.converged, search.n_steps)


def _by_adam(problem: Problem, posterior: Posterior, start: Expansion, adam: Adam) -> Found:
    theta = start.theta.clone()
    optimiser = torch.optim.Adam([theta], lr=adam.lr)
    statistics = start.statistics
    for _ in range(adam.n_steps):
        from_data, pull = problem.gradient(theta, statistics)
        theta.grad = pull - from_data
        optimiser.step()
        outputs = _outputs(problem, theta - start.theta)
        statistics = problem.statistics(theta, outputs)
    expansion = replace(start, theta=theta, statistics=statistics)
    from_data, pull = problem.gradient(theta, statistics)
    relative = float((from_data - pull).norm() / (from_data.norm() + pull.norm() + 1e-300))
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
        from_data, pull = problem.gradient(at.theta, at.statistics)
        gradients.append(float((from_data - pull).abs().max()))
    if not problem.design.precise:
        check_number(end.statistics.n, n)
    expansion = replace(end, outputs=None, statistics=replace(end.statistics, n=n))
    return Found(end.theta, expansion, tuple(path), gradients[0], gradients[1], converged, n_steps)
