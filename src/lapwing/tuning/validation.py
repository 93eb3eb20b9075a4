"""Hyperparameters by held-out data: what the evidence left open is decided by predictive NLL.

The evidence gives the shape of the prior. Held-out data give its overall scale, the noise or the temperature of the
classes, the mean and the link: a few numbers. The plain network and the temperature-scaled one are among the
candidates, and none that does worse than they do is taken.

A small held-out set cannot tell many candidates apart, and the best of many is best by luck. So each number has a weak
prior of its own, worth a few nats in all: a scale within some decades of the evidence's, T near one where the
covariance is used, the network's own mean, the exact link. A hundred held-out data overrule it where there is something
to gain; where there is not, error bars that know what they have not seen are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log10

import torch

from lapwing._types import Float, Tensor
from lapwing.data import Batches
from lapwing.likelihoods import Gaussian
from lapwing.posterior import Posterior, Readout
from lapwing.predictive import SiteGaussian
from lapwing.predictive.link_rules import DEFAULT
from lapwing.tuning.held_out import HeldOut, Shift, scaled
from lapwing.tuning.scoring import Freedom, Score, Targets, final_score, quick_scores
from lapwing.tuning.step import Step, noise_is_free, noise_of, step, with_noise

NO_SPREAD = 1e12  # the scale at which the posterior is the network itself, to rounding
GRID = torch.tensor([*(10 ** (k / 2) for k in range(-6, 11)), 1e6, 1e7, NO_SPREAD], dtype=torch.float64)
_FINALISTS = 16

# Nats that a candidate has to gain on the held-out data as a whole before it is preferred.
_COST_OF_MEAN = {"network": 0.0, "newton": 1.0, "half": 1.0, "linear": 2.0}
_COST_OF_LINK = 0.5
_SCALE_STD = 2.0  # decades: the evidence is often wrong, but seldom by more than that
_DECADES_OF_NO_SPREAD = 8.0
_TIE = 1e-6  # nats per term
_STD_WITH_SPREAD = 0.5  # of log T: the covariance is there to do the work of a temperature
_STD_OF_COLDER = 0.5  # of log T < 0 for the network alone: labels that are all right say nothing of how right


@dataclass(frozen=True)
class Candidate:
    """One way to read predictions off a posterior, with its held-out score."""

    scale_index: int
    mean: str
    score: Score

    @property
    def scale(self) -> float:
        return float(GRID[self.scale_index])

    @property
    def cost(self) -> float:
        """Nats of the weak prior."""
        link = 0.0 if self.score.link == DEFAULT else _COST_OF_LINK
        decades = min(abs(log10(self.scale)), _DECADES_OF_NO_SPREAD)
        return _COST_OF_MEAN[self.mean] + self.score.cost + link + 0.5 * (decades / _SCALE_STD) ** 2


def search_validation(
    posterior: Posterior, held_out: Batches, *, noise: bool, progress: bool | None = None
) -> Posterior:
    """The candidate the held-out data prefer: one pass over them, none over the training data."""
    network = replace(posterior, readout=Readout())
    shifts = _shifts(network)
    data = HeldOut.of(network, held_out, GRID, shifts, progress)
    targets = Targets(data.y, data.sites, len(data.f) * data.sites.t)
    free = noise and noise_is_free(posterior)
    candidates = _all_candidates(network, data, [shift.name for shift in shifts], targets, free)
    best = _preferred(candidates, targets.n_terms)
    weights = {shift.name: shift.weights for shift in shifts}
    chosen = _built(network, best, weights)
    steps = [*_steps(network, candidates, weights), _step(network, best, weights, "taken")]
    return replace(chosen, history=(*posterior.history, *steps))


def _shifts(posterior: Posterior) -> list[Shift]:
    """Means to choose from besides the network's."""
    shifts = []
    if posterior.precision.of_weights:
        gradient = posterior.data_gradient()
        newton = [scaled(posterior, s).precision.solve(gradient) for s in GRID.tolist()]
        shifts.append(Shift("newton", torch.stack(newton).detach()))
    if posterior.expansion is not None:
        to_mode = (posterior.linear_mode() - posterior.linearised.theta).detach()[None]
        shifts += [Shift("half", 0.5 * to_mode), Shift("linear", to_mode)]
    return shifts


def _all_candidates(
    posterior: Posterior, data: HeldOut, names: list[str], targets: Targets, free: bool
) -> list[Candidate]:
    likelihood = posterior.likelihood
    candidates = [
        Candidate(i, name, score)
        for name in ("network", *names)
        for i in range(len(GRID))
        for score in quick_scores(likelihood, _gaussian(data, names, name, i), targets, _freedom(i, free))
    ]
    finalists = sorted(candidates, key=lambda c: c.score.nll)[:_FINALISTS]
    dear = {
        (c.scale_index, c.mean): final_score(
            likelihood,
            _gaussian(data, names, c.mean, c.scale_index),
            targets,
            _freedom(c.scale_index, free),
            c.score.dispersion,
        )
        for c in finalists
    }
    return candidates + [Candidate(i, name, score) for (i, name), score in dear.items() if score is not None]


def _gaussian(data: HeldOut, names: list[str], name: str, i: int) -> SiteGaussian:
    if name == "network":
        return SiteGaussian(data.f, data.covs[i])
    moves = data.moves[names.index(name)]
    return SiteGaussian(data.f + moves[min(i, len(moves) - 1)], data.covs[i])


def _freedom(scale_index: int, free_noise: bool) -> Freedom:
    spread = float(GRID[scale_index]) < NO_SPREAD
    return Freedom(free_noise, *((_STD_WITH_SPREAD, _STD_WITH_SPREAD) if spread else (_STD_OF_COLDER, inf)))


def _preferred(candidates: list[Candidate], n_terms: int) -> Candidate:
    """Least NLL plus cost, among those no worse than the network as it is and at its best temperature."""
    plain = min(c.score.nll for c in candidates if c.scale == NO_SPREAD and c.mean == "network")
    allowed = [c for c in candidates if c.score.nll <= plain + _TIE]
    return min(allowed, key=lambda c: n_terms * c.score.nll + c.cost)


def _built(posterior: Posterior, best: Candidate, weights: dict[str, Float[Tensor, "s p"]]) -> Posterior:
    """The posterior the candidate stands for."""
    moved = scaled(posterior, best.scale)
    shift = None
    if best.mean != "network":
        each = weights[best.mean]
        shift = each[min(best.scale_index, len(each) - 1)]
    if not isinstance(posterior.likelihood, Gaussian):
        return replace(moved, readout=Readout(shift, best.score.dispersion, best.score.link))
    # Noise and covariance both times a: the precision matrix divided by a.
    a = best.score.dispersion
    if a != 1.0:
        moved = with_noise(scaled(moved, 1 / a), noise_of(posterior) * a**0.5)
    return replace(moved, readout=Readout(shift))


def _steps(posterior: Posterior, candidates: list[Candidate], weights: dict[str, Tensor]) -> list[Step]:
    """For every scale the best candidate at it, with the evidence there: do the two agree?"""
    steps = []
    for i in range(len(GRID)):
        best = min((c for c in candidates if c.scale_index == i), key=lambda c: c.score.nll)
        steps.append(_step(posterior, best, weights, "tried"))
    return steps


def _step(posterior: Posterior, candidate: Candidate, weights: dict[str, Tensor], what: str) -> Step:
    words = f"validation, {what}: {candidate.mean} mean, dispersion {candidate.score.dispersion:.3g}"
    evidence = float(scaled(posterior, candidate.scale).log_evidence().detach())
    built = _built(posterior, candidate, weights)
    return step(-candidate.score.nll, built, words, scale=candidate.scale, evidence=evidence)
