"""Variational refinement: from the linear model's mode to the Gaussian of largest ELBO, full or diagonal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing import curvature
from lapwing._types import Float, Tensor
from lapwing.curvature import Exact, Fisher
from lapwing.errors import StructureError
from lapwing.likelihoods import Gaussian
from lapwing.linear_model import Expansion, Refinement
from lapwing.operators import Curvature
from lapwing.planning import in_words
from lapwing.posterior import Posterior, Readout
from lapwing.refinement.covariances import Covariance, root_of
from lapwing.refinement.curvature import PrecomputedRoots
from lapwing.refinement.expectations import expectation
from lapwing.refinement.laplace import mode_in_memory
from lapwing.refinement.model import LinearModel, gathered
from lapwing.refinement.passes import CountedPasses
from lapwing.refinement.sampled import SampledSteps, take_steps
from lapwing.refinement.variational import Ascent, AscentResult, VariationalProblem, ascend
from lapwing.runtime import distributed


@dataclass(frozen=True)
class Variational:
    """A value of lw.refine(by=...): its covariance, and how the bound is maximised."""

    word: str
    covariance: Covariance
    steps: Ascent | SampledSteps

    def at_most(self, n: int) -> Variational:
        """The same with at most n steps."""
        return replace(self, steps=self.steps.at_most(n))


def refine_variational(
    posterior: Posterior, source: CountedPasses, most_floats: int, way: Variational, *, generator: torch.Generator
) -> Posterior:
    """N(μ, P⁻¹) that maximises the ELBO of the linear model; its ELBO is in `refinement.bound`.

    Starts at the linear model's mode, so that the final bound is never below that of the Laplace approximation. The
    published steps start at the trained weights.
    """
    _check(posterior, most_floats, way)
    model = gathered(posterior, source)
    way.covariance.check(model)
    found = None
    if distributed.rank() == 0:  # every rank has all data, so one does the work
        with distributed.alone():
            found = _found(model, posterior, way, generator)
    end = distributed.broadcast(found, 0)
    assert end is not None
    parts = _parts(posterior, source, model, end.curvature, way.covariance)
    return replace(
        posterior,
        estimate=replace(posterior.estimate, parts=parts),
        structure=way.covariance.structure,
        fisher=Exact(),
        why=f'refine(by="{way.word}")',
        expansion=end.expansion,
        readout=Readout(end.theta - posterior.linearised.theta),
        refinement=replace(end.report, n_passes=min(distributed.gathered(source.n))),
    )


@dataclass(frozen=True, eq=False)
class _Found:
    """The Gaussian, the linear model's mode (if it was computed), and the record."""

    theta: Float[Tensor, " p"]
    curvature: Float[Tensor, "m c c"]
    expansion: Expansion | None
    report: Refinement


def _found(model: LinearModel, posterior: Posterior, way: Variational, generator: torch.Generator) -> _Found:
    rule = expectation(model.likelihood, model.f.shape[1], model.y, generator=generator)
    expansion, end = _optimised(VariationalProblem(model, way.covariance, rule), posterior, way.steps, generator)
    report = Refinement(
        way.word,
        end.path,
        _largest_gradient(model),
        end.gradient,
        end.converged,
        end.n_steps,
        0,
        end.iterate.bound,
    )
    return _Found(end.iterate.theta, end.iterate.curvature, expansion, report)


def _optimised(
    problem: VariationalProblem, posterior: Posterior, steps: Ascent | SampledSteps, generator: torch.Generator
) -> tuple[Expansion | None, AscentResult]:
    """The linear model's mode (if it was computed), and the result of the optimisation."""
    model = problem.model
    if isinstance(steps, SampledSteps):
        start = problem.iterate(model.theta, model.hessian(model.f))
        return None, take_steps(problem, start, steps, generator=generator)
    mode = mode_in_memory(model, posterior)
    start = problem.iterate(mode.theta, model.hessian(model.outputs(mode.theta)))
    return mode.expansion, ascend(problem, start, steps)


def _largest_gradient(model: LinearModel) -> float:
    """Largest entry of the gradient of the log joint density at the trained weights."""
    return float((model.vjp(model.residual(model.f)) - model.prior_gradient(model.theta)).abs().max())


def _check(posterior: Posterior, most_floats: int, way: Variational) -> None:
    likelihood = posterior.likelihood
    if not likelihood.canonical:
        raise StructureError(
            f'refine(by="{way.word}") needs Λ = −∇² log p for its steps to ascend the bound; that of '
            f'{type(likelihood).__name__} is an expectation or a projection. Use by="laplace".'
        )
    floats = posterior.n_data * posterior.linearised.k * posterior.layout.p
    if floats > most_floats:
        raise StructureError(
            f'refine(by="{way.word}") keeps the Jacobian of all data, {posterior.n_data} × {posterior.linearised.k} × '
            f"{posterior.layout.p} numbers, {in_words(8 * floats)}, but {in_words(8 * most_floats)} are allowed. Use "
            'by="laplace", which needs no such array, give more memory=..., or infer fewer weights: params=... in '
            "lw.fit."
        )


def _parts(
    posterior: Posterior,
    source: CountedPasses,
    model: LinearModel,
    Lambda: Float[Tensor, "m c c"],
    covariance: Covariance,
) -> tuple[Curvature, ...]:
    """E_q[JᵀΛJ] at unit dispersion, by one more pass, with the Jacobian factors of the network."""
    fisher: Fisher = Exact()
    if not isinstance(posterior.likelihood, Gaussian):
        S = root_of(model, Lambda / model.likelihood_scale)
        fisher = PrecomputedRoots(S.reshape(model.n, -1, *S.shape[1:])[model.own])
    return curvature.estimate(
        posterior.linearised,
        posterior.likelihood,
        source,
        sites=posterior.sites,
        structure=covariance.structure,
        fisher=fisher,
        chunk_floats=posterior.chunk_floats,
    ).parts
