"""Curvature of classifiers averaged over the posterior of the outputs, instead of evaluated at its mean.

Λ of a softmax vanishes where the network is confident, even if the posterior there is wide. The curvature at the mean
then underestimates the average curvature of the likelihood under the posterior. The Gaussian that maximises the
evidence lower bound of the linear model has P = E_q[JᵀΛJ] + P₀. One natural-gradient step of length one towards it,
from q = N(θ*, P⁻¹), is

    Λ̄_n = E[Λ(h)], h ~ N(f_n, J_n P⁻¹ J_nᵀ),    P ← Σ_n J_nᵀ Λ̄_n J_n + P₀.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lapwing import curvature
from lapwing._types import Float, Tensor
from lapwing.curvature import Exact, Sampled, Signs
from lapwing.data import ModelInput
from lapwing.errors import located
from lapwing.likelihoods import Bernoulli, Categorical
from lapwing.network.products import Source
from lapwing.posterior import Posterior
from lapwing.predictive import SiteGaussian, site_gaussian
from lapwing.refinement.curvature import PrecomputedRoots
from lapwing.refinement.expectations import Expectation, expectation
from lapwing.runtime.arguments import seeded


def can_average(posterior: Posterior, most_floats: int) -> bool:
    """Whether this applies: classification, a curvature that is a sum over data, and memory for all Λ̄."""
    structure, sites = posterior.structure, posterior.sites
    known = isinstance(posterior.fisher, Exact) or sketched(posterior)
    sums = structure.sums_rows and known
    fits = posterior.n_data * sites.t * sites.c**2 <= most_floats
    return sums and fits and isinstance(posterior.likelihood, Bernoulli | Categorical)


def sketched(posterior: Posterior) -> bool:
    """Whether the curvature is a random sketch of the exact one.

    Its average is then computed exactly, with all columns.
    """
    return isinstance(posterior.fisher, Sampled) and isinstance(posterior.fisher.drawing, Signs)


def averaged(posterior: Posterior, source: Source) -> Posterior:
    """The same posterior and structure with averaged curvature.

    Two passes, one of which computes output covariances.
    """
    none = torch.zeros(0, posterior.sites.t, posterior.sites.c, posterior.sites.c, dtype=torch.float64)
    none = none.to(posterior.linearised.network.device)  # a rank without data has only this
    roots = PrecomputedRoots(torch.cat([none, *_roots(posterior, source)]))
    fresh = curvature.estimate(
        posterior.linearised,
        posterior.likelihood,
        roots.along(source),
        sites=posterior.sites,
        structure=posterior.structure,
        fisher=roots,
        chunk_floats=posterior.chunk_floats,
    )
    return replace(posterior, estimate=replace(posterior.estimate, parts=fresh.parts, in_expectation=True))


def _roots(posterior: Posterior, source: Source) -> Iterator[Float[Tensor, "n t c k"]]:
    """S (n, t, c, k) of every likelihood term with S Sᵀ = Λ̄."""
    rule = None
    for number, (x, y) in enumerate(source()):
        with located(f"batch {number}"):
            rule = rule or expectation(posterior.likelihood, posterior.sites.c, y.flatten(0, 1), generator=seeded(None))
            yield from _roots_of_batch(posterior, x, y, rule)


def _roots_of_batch(
    posterior: Posterior, x: ModelInput, y: Tensor, rule: Expectation
) -> Iterator[Float[Tensor, "n t c k"]]:
    start = 0
    for f, J in posterior.weights.jacobians(x):
        gaussian = site_gaussian(posterior.precision, f, J, posterior.sites)
        yield _root(posterior, gaussian, y[start : start + len(f)], rule)
        start += len(f)


def _root(posterior: Posterior, gaussian: SiteGaussian, y: Tensor, rule: Expectation) -> Float[Tensor, "n t c k"]:
    mean, cov = gaussian.mean.flatten(0, 1), gaussian.cov.flatten(0, 1)
    hessian = rule(posterior.likelihood, y.flatten(0, 1), mean, (cov + cov.mT) / 2).hessian
    values, U = torch.linalg.eigh(hessian)
    return (U * values.clamp(min=0).sqrt()[..., None, :]).reshape(*gaussian.cov.shape)
