"""The record of one step of tuning, and helpers to change the hyperparameters of a posterior."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.likelihoods import Gaussian
from lapwing.posterior import Posterior


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
