"""Hyperparameters by held-out data: what the evidence left open is decided by predictive NLL.

The evidence gives the shape of the prior. Held-out NLL gives its overall scale, the noise or the temperature of the
classes, the mean (the network's outputs or the linear mode's) and the link. A prior without any spread is among the
candidates, with and without temperature, so the winner is never worse there than the plain network or the
temperature-scaled one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing._types import Tensor
from lapwing.data import Batches
from lapwing.posterior import Posterior, Readout
from lapwing.predictive.link_rules import Link
from lapwing.tuning.held_out import HeldOut, Score, best_scores, links_for
from lapwing.tuning.step import Step, noise_is_free, noise_of, step, with_noise

NO_SPREAD = 1e12  # the scale at which the posterior is the network itself, to rounding
GRID = torch.cat([torch.logspace(-4, 6, 21, dtype=torch.float64), torch.tensor([NO_SPREAD], dtype=torch.float64)])


@dataclass(frozen=True)
class Candidate:
    """One way to read predictions off a posterior, with its held-out score."""

    scale: float  # of all prior precisions
    shifted: bool  # whether the mean is the linear mode's
    link: Link
    score: Score


def search_validation(
    posterior: Posterior, held_out: Batches, *, noise: bool, progress: bool | None = None
) -> Posterior:
    """The candidate with the least held-out NLL: one pass over the held-out data, none over the training data."""
    network = replace(posterior, readout=Readout())
    shift = _mode_shift(posterior)
    data = HeldOut.of(network, held_out, GRID, shift, progress)
    free = noise and noise_is_free(posterior)
    candidates = _candidates(network, data, free)
    best = min(candidates, key=lambda c: c.score.nll)
    chosen = _built(network, best, shift)
    return replace(chosen, history=(*posterior.history, *_steps(network, candidates)))


def _mode_shift(posterior: Posterior) -> Tensor | None:
    """θ_* − θ*, where a linear mode has been found."""
    if posterior.expansion is None:
        return posterior.readout.shift
    return (posterior.linear_mode() - posterior.linearised.theta).detach()


def _candidates(posterior: Posterior, data: HeldOut, free: bool) -> list[Candidate]:
    return [
        Candidate(scale, shifted, link, score)
        for shifted, mean in zip((False, True), data.means(), strict=False)
        for link in links_for(posterior.likelihood, posterior.sites.c)
        for scale, score in zip(GRID.tolist(), best_scores(posterior.likelihood, data, mean, link, free), strict=True)
    ]


def _built(posterior: Posterior, best: Candidate, shift: Tensor | None) -> Posterior:
    """The posterior the candidate stands for."""
    precisions = posterior.prior.precisions.detach() * best.scale
    if noise_is_free(posterior):
        # Noise and covariance both times a: the precision matrix divided by a.
        a = best.score.dispersion
        moved = posterior.with_prior(posterior.prior.with_precisions(precisions / a))
        moved = with_noise(moved, noise_of(posterior) * a**0.5)
        return replace(moved, readout=Readout(shift if best.shifted else None))
    moved = posterior.with_prior(posterior.prior.with_precisions(precisions))
    return replace(moved, readout=Readout(shift if best.shifted else None, best.score.dispersion, best.link))


def _steps(posterior: Posterior, candidates: list[Candidate]) -> list[Step]:
    """For every scale the best candidate at it, with the evidence there: do the two agree?"""
    steps = []
    for scale in GRID.tolist():
        best = min((c for c in candidates if c.scale == scale), key=lambda c: c.score.nll)
        built = _built(posterior, best, None)
        steps.append(step(-best.score.nll, built, "validation", scale=scale))
    return steps
