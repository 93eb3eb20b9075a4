"""The record of one step of tuning, and helpers to change the hyperparameters of a posterior."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import NumericalError
from lapwing.likelihoods import Gaussian
from lapwing.operators import Precision
from lapwing.posterior import Posterior

_LEAST_RESOLVED = 1e-14  # of the largest eigenvalue of H: a smaller prior precision is lost in its rounding
_RAISED = (
    "The evidence prefers prior precisions that double precision cannot resolve beside the curvature; they were raised "
    "to at least {:.3g}. Targets without noise do this: give the noise, lw.Gaussian(noise_std=...), or a larger prior."
)


@dataclass(frozen=True)
class Step:
    """One step of tuning, as in `posterior.history`."""

    score: float  # log evidence, or minus the held-out NLL per likelihood term
    precisions: tuple[float, ...]
    noise_std: tuple[float, ...]
    note: str = ""
    scale: float | None = None  # common factor on all precisions, if chosen on held-out data
    evidence: float | None = None  # log evidence at that scale


def step(
    score: Tensor | float,
    posterior: Posterior,
    note: str = "",
    *,
    scale: float | None = None,
    evidence: float | None = None,
) -> Step:
    precisions = tuple(posterior.prior.precisions.detach().tolist())
    return Step(float(score), precisions, tuple(noise_of(posterior).tolist()), note, scale, evidence)


def noise_is_free(posterior: Posterior) -> bool:
    return isinstance(posterior.likelihood, Gaussian) and posterior.likelihood.estimated


def noise_of(posterior: Posterior) -> Float[Tensor, " g"]:
    likelihood = posterior.likelihood
    return likelihood.resolved().detach() if isinstance(likelihood, Gaussian) else torch.ones(0, dtype=torch.float64)


def with_noise(posterior: Posterior, noise_std: Float[Tensor, " g"]) -> Posterior:
    likelihood = posterior.likelihood
    assert isinstance(likelihood, Gaussian)
    return posterior.with_likelihood(likelihood.with_noise_std(noise_std))


def at(posterior: Posterior, precisions: Float[Tensor, " g"], scales: Float[Tensor, " s"] | None) -> Posterior:
    """The posterior with these precisions and, for a Gaussian likelihood, noise σ² = κ/c."""
    moved = posterior.with_prior(posterior.prior.with_precisions(precisions))
    if scales is None or not isinstance(posterior.likelihood, Gaussian):
        return moved
    return with_noise(moved, (posterior.likelihood_scale.detach() / scales).sqrt())


def log_bounds(posterior: Posterior) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
    """Bounds on the log precision of each group; see `Posterior.precision_bounds`."""
    low, high = posterior.precision_bounds()
    return low.log(), high.log()


def with_resolved_prior(posterior: Posterior) -> Posterior:
    """Raise prior precisions that are lost in the rounding of the curvature to what double precision resolves.

    Targets without noise let the evidence rise as noise and prior precision fall together, to bounds where H + P₀ has
    no correct Cholesky factor. The precisions become at least 1e-14 λ_max(H), and `diagnose()` says so.
    """
    H = posterior.curvature
    if not H.precise:
        return posterior
    # λ_max(H) ≤ tr H, and no eigenvalue of H + P₀ is below the smallest precision: usually nothing needs a factor.
    if float(posterior.prior.precisions.detach().min()) > _LEAST_RESOLVED * float(H.trace().detach()):
        return posterior
    if is_factored(posterior.precision):
        return posterior
    least = _LEAST_RESOLVED * float(H.norm().detach())
    prior = posterior.prior.with_precisions(posterior.prior.precisions.clamp(min=least))
    said = (words for words in posterior.left_open if words[:40] != _RAISED[:40])  # by an earlier step of the search
    return replace(posterior.with_prior(prior), left_open=(*said, _RAISED.format(least)))


def is_factored(P: Precision) -> bool:
    """Whether P has a determinant beyond rounding."""
    try:
        P.logdet()
    except NumericalError:
        return False
    return True
