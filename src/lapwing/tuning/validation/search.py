"""Hyperparameters by held-out data: what the evidence left open is decided by predictive NLL.

The evidence gives the shape of the prior. Held-out data give its overall scale, the noise or the temperature of the
classes, the mean and the link: a few numbers. The plain network and the temperature-scaled one are among the
candidates, and none that does worse than they do is taken.

A small held-out set cannot tell many candidates apart, and the best of many is best by luck. So scales are averaged by
their held-out likelihood, the mean is moved only for a gain beyond its standard error, and each number has a weak prior
of its own, worth a few nats in all: a scale within some decades of the evidence's, T and the noise's factor near one (T
above it only where the covariance is used), the exact link. A hundred held-out data overrule it where there is
something to gain; where there is not, error bars that know what they have not seen are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, log10

import torch

from lapwing._types import Float, Tensor
from lapwing.data import Batches
from lapwing.data.targets import encode_batch
from lapwing.errors import NumericalError
from lapwing.likelihoods import Gaussian
from lapwing.operators import DenseCurvature, LowRankCurvature
from lapwing.posterior import Posterior, Readout, predicted
from lapwing.predictive.link_rules import DEFAULT
from lapwing.runtime import distributed
from lapwing.tuning.step import Step, noise_is_free, noise_of, step, with_noise
from lapwing.tuning.validation.held_out import MOST_COMPARED, HeldOut, Shift, scaled, some_inputs
from lapwing.tuning.validation.scoring import Freedom, Score, final_scores, quick_scores, row_scores
from lapwing.tuning.validation.some_outputs import plain

NO_SPREAD = 1e12  # the scale at which the posterior is the network itself, to rounding
GRID = torch.tensor([*(10 ** (k / 2) for k in range(-6, 11)), 1e6, 1e7], dtype=torch.float64)
MOST_CONFIRMED = 1_024  # held-out inputs on which the winner is weighed against the network
_FINALISTS = 6
_MANY = 1_000  # rows or parameters, above which factorisations at all scales take longer than a small training

# Nats that a candidate has to gain on the held-out data as a whole before it is preferred.
_COST_OF_MEAN = {"network": 0.0, "newton": 1.0, "quarter step": 1.0, "half step": 1.0, "step": 2.0}
_COST_OF_MEAN |= {"half": 1.0, "linear": 2.0}
_COST_OF_LINK = 0.5
_SCALE_STD = 2.0  # decades: the evidence is often wrong, but seldom by more than that
_DECADES_OF_NO_SPREAD = 8.0
_TIE = 1e-6  # nats per term
_STANDARD_ERRORS = 0.5  # of a gain on held-out data that are taken off it: luck
_STD_OF_NOISE = 0.25  # of the log factor of a Gaussian's variances: as much as 32 data say of it
_STD_OF_WARMER = 0.5  # of log T > 0 with a covariance, which is there to do the work of a temperature
_STD_OF_COLDER = 0.2  # of log T < 0: labels that are all right say nothing of how right


@dataclass(frozen=True)
class Candidate:
    """One way to read predictions off a posterior, with its held-out score."""

    scale_index: int
    scale: float
    mean: str
    score: Score

    @property
    def cost(self) -> float:
        """Nats of the weak prior."""
        link = 0.0 if self.score.link == DEFAULT else _COST_OF_LINK
        decades = min(abs(log10(self.scale)), _DECADES_OF_NO_SPREAD)
        return _COST_OF_MEAN[self.mean] + self.score.cost + link + 0.5 * (decades / _SCALE_STD) ** 2


def search_validation(
    posterior: Posterior, held_out: Batches, *, noise: bool, keep_mean: bool = False, progress: bool | None = None
) -> Posterior:
    """The candidate that the held-out data prefer; no pass over the training data.

    Scales and means are compared on some hundred inputs; the winner is weighed against the network, and its noise or
    temperature chosen, on up to a thousand. Where a datum has many outputs, some hundred likelihood terms choose all,
    and the winner's own predictions are weighed against the network's.
    """
    network = replace(posterior, readout=Readout())
    free = noise and noise_is_free(posterior)
    ladder = {s: scaled(network, s) for s in _grid(network)}
    ladder, shifts = _shifts(network, ladder, keep_mean)
    precisions = [each.precision for each in ladder.values()]
    data = HeldOut.of(network, held_out, precisions, shifts, MOST_COMPARED, progress)
    candidates = _all_candidates(network, data, list(ladder), free)
    best = averaged(candidates, partial(_rows, data))
    if network.averages_functions:
        alone = _preferred(_alone(candidates), data.n_terms)
        taken = best if _no_worse(_built(network, best, shifts), alone, held_out) else alone
    else:
        taken = _confirmed(network, best, ladder, shifts, held_out, free, progress)
    chosen = _built(network, taken, shifts)
    steps = [*_steps(network, candidates, ladder, shifts), _step(network, taken, ladder, shifts, "taken")]
    return replace(chosen, history=(*posterior.history, *steps))


def _grid(posterior: Posterior) -> list[float]:
    """Half decades; whole ones where a factorisation for each scale would take too much time or memory.

    Whole ones for many outputs too, of which only some are compared.
    """
    side = min(posterior.layout.p, posterior.n_data * posterior.linearised.k)
    dense = isinstance(posterior.curvature, DenseCurvature | LowRankCurvature)
    scales = GRID.tolist()
    large = side > _MANY or len(scales) * side**2 > 3 * posterior.chunk_floats
    return scales[::2] if (dense and large) or posterior.averages_functions else scales


def _shifts(
    posterior: Posterior, ladder: dict[float, Posterior], keep_mean: bool
) -> tuple[dict[float, Posterior], list[Shift]]:
    """The scales at which the precision stands above rounding, and ways to move the mean away from the network's."""
    shifts: list[Shift] = []
    if not posterior.precision.has_weights or posterior.averages_functions:
        return ladder, shifts
    room = 2 * len(ladder) * posterior.layout.p <= 3 * posterior.chunk_floats
    if room and not keep_mean:
        steps = {s: found for s, each in ladder.items() if (found := _newton_steps(each)) is not None}
        ladder = {s: ladder[s] for s in steps}
        newton, towards_mode = (torch.stack(each) for each in zip(*steps.values(), strict=True))
        shifts.append(Shift({"newton": 1.0}, newton))
        shifts.append(Shift({"quarter step": 0.25, "half step": 0.5, "step": 1.0}, towards_mode))
    if posterior.expansion is not None and not keep_mean:
        mode = _resolved(posterior.linear_mode)
        if mode is not None:
            to_mode = (mode - posterior.linearised.theta).detach()[None]
            shifts.append(Shift({"half": 0.5, "linear": 1.0}, to_mode))
    return ladder, shifts


def _resolved(solved: Callable[[], Tensor]) -> Tensor | None:
    """None under a prior so weak that P is lost in rounding."""
    try:
        return solved()
    except NumericalError:
        return None


def _newton_steps(posterior: Posterior) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]] | None:
    """P⁻¹ g and P⁻¹ (g − P₀ (θ* − m₀)); None under a prior so weak that P is lost in rounding."""
    data, prior = posterior.data_gradient(), posterior.prior
    pull = prior.P0.diagonal * (posterior.linearised.theta - prior.mean)
    solved = _resolved(lambda: posterior.precision.solve(torch.stack([data, data - pull])).detach())
    return None if solved is None else (solved[0], solved[1])


def _all_candidates(posterior: Posterior, data: HeldOut, scales: list[float], free: bool) -> list[Candidate]:
    likelihood, targets = data.likelihood, data.targets
    candidates = [
        Candidate(i, s, name, score)
        for name in data.means
        for i, s in enumerate(scales)
        for score in quick_scores(likelihood, data.gaussian(name, i), targets, _freedom(s, free))
    ]
    alone = quick_scores(likelihood, data.alone, targets, _freedom(NO_SPREAD, free))
    candidates += [Candidate(len(scales), NO_SPREAD, "network", score) for score in alone]
    # Where predictions average draws of functions, only the link that takes draws is theirs.
    links = {DEFAULT} if posterior.averages_functions else {DEFAULT, *(c.score.link for c in candidates)}
    finalists = sorted(candidates, key=lambda c: c.score.nll)[:_FINALISTS]
    finalists += [c for c in candidates if c.scale == NO_SPREAD and c not in finalists]
    candidates += [
        replace(c, score=score)
        for c in finalists
        for score in final_scores(
            likelihood,
            data.alone if c.scale == NO_SPREAD else data.gaussian(c.mean, c.scale_index),
            targets,
            _freedom(c.scale, free),
            c.score,
        )
    ]
    return [c for c in candidates if c.score.link in links]


Rows = Callable[[Candidate], Float[Tensor, " n"]]


def averaged(candidates: list[Candidate], rows: Rows) -> Candidate:
    """The network's mean at the average log scale; or the candidate with another mean whose gain is surest, if any is.

    The average is over the network's candidates, weighed by exp(−n · NLL − cost): the best of many scales on few data
    is best by luck, and their average changes little where the data say little. `rows` gives the log probability of
    every held-out term.
    """
    kept = [c for c in candidates if c.mean == "network"]
    n = len(rows(kept[0]))

    def total(c: Candidate) -> float:
        return n * c.score.nll + c.cost

    at_scale = [min((c for c in kept if c.scale == s), key=total) for s in sorted({c.scale for c in kept})]
    weights = torch.softmax(-torch.tensor([total(c) for c in at_scale], dtype=torch.float64), 0)
    decades = torch.tensor([min(log10(c.scale), _DECADES_OF_NO_SPREAD) for c in at_scale], dtype=torch.float64)
    taken = at_scale[int((decades - weights @ decades).abs().argmin())]
    moved = [c for c in candidates if c.mean != "network"]
    if not moved:
        return taken
    sure = [_sure_gain(rows(c) - rows(taken)) - c.cost + taken.score.cost for c in moved]
    best = max(range(len(moved)), key=sure.__getitem__)
    return moved[best] if sure[best] > 0 else taken


def _sure_gain(d: Float[Tensor, " n"]) -> float:
    """Σ d less half its standard error √n · std(d), for paired differences d of log probabilities."""
    return float(d.sum() - _STANDARD_ERRORS * d.std() * len(d) ** 0.5) if len(d) > 1 else -inf


def _rows(data: HeldOut, c: Candidate) -> Float[Tensor, " n"]:
    gaussian = data.alone if c.scale == NO_SPREAD else data.gaussian(c.mean, c.scale_index)
    return row_scores(data.likelihood, gaussian, data.targets, c.score)


def _confirmed(
    posterior: Posterior,
    best: Candidate,
    ladder: dict[float, Posterior],
    shifts: list[Shift],
    held_out: Batches,
    free: bool,
    progress: bool | None,
) -> Candidate:
    """The winner, if it is no worse than the network on more of the held-out data; its dispersion from them."""
    spread = best.scale != NO_SPREAD
    precisions = [ladder[best.scale].precision] if spread else []
    ways = [
        Shift({best.mean: 1.0}, shift.weights_of(best.mean, best.scale_index)[None])
        for shift in shifts
        if best.mean in shift.lengths
    ]
    data = HeldOut.of(posterior, held_out, precisions, ways, MOST_CONFIRMED, progress)
    found = _all_candidates(posterior, data, [best.scale] if spread else [], free)
    found = [c for c in found if c.mean == best.mean or c.scale == NO_SPREAD]
    taken = _preferred(found, data.n_terms)
    return replace(taken, scale_index=best.scale_index * (taken.scale == best.scale))


def _alone(candidates: list[Candidate]) -> list[Candidate]:
    return [c for c in candidates if c.scale == NO_SPREAD and c.mean == "network"]


def _no_worse(chosen: Posterior, alone: Candidate, held_out: Batches) -> bool:
    """Whether predictions, made as the user's will be, are no worse than the network's at its best temperature.

    Where a datum has many outputs, scales were compared on some of them.
    """
    gain = torch.zeros((), dtype=torch.float64)
    for x, y in some_inputs(chosen, held_out, MOST_COMPARED):
        _, encoded = encode_batch(x, y, chosen.likelihood, chosen.sites)
        f = chosen.sites.split(chosen.linearised.outputs(x).double()) / alone.score.dispersion
        gain += (
            predicted(chosen, x).log_prob(y).double().sum() - plain(chosen.likelihood).log_prob(f, encoded).sum()
        ).cpu()
    return float(distributed.total(gain)) >= 0


def _freedom(scale: float, free_noise: bool) -> Freedom:
    return Freedom(_STD_OF_NOISE * free_noise, _STD_OF_COLDER, _STD_OF_WARMER if scale < NO_SPREAD else inf)


def _preferred(candidates: list[Candidate], n_terms: int) -> Candidate:
    """Least NLL plus cost, among those no worse than the network as it is and at its best temperature."""
    alone = min(c.score.nll for c in _alone(candidates))
    allowed = [c for c in candidates if c.score.nll <= alone + _TIE]
    return min(allowed, key=lambda c: n_terms * c.score.nll + c.cost)


def _built(posterior: Posterior, best: Candidate, shifts: list[Shift]) -> Posterior:
    """The posterior the candidate stands for."""
    moved = scaled(posterior, best.scale)
    shift = next((each.weights_of(best.mean, best.scale_index) for each in shifts if best.mean in each.lengths), None)
    if not isinstance(posterior.likelihood, Gaussian):
        return replace(moved, readout=Readout(shift, best.score.dispersion, best.score.link))
    # Noise and covariance both times a: the precision matrix divided by a.
    a = best.score.dispersion
    if a != 1.0:
        moved = with_noise(scaled(moved, 1 / a), noise_of(posterior) * a**0.5)
    return replace(moved, readout=Readout(shift))


def _steps(
    posterior: Posterior, candidates: list[Candidate], ladder: dict[float, Posterior], shifts: list[Shift]
) -> list[Step]:
    """For every scale the best candidate at it, with the evidence there: do the two agree?"""
    steps = []
    for i in sorted({c.scale_index for c in candidates}):
        best = min((c for c in candidates if c.scale_index == i), key=lambda c: c.score.nll)
        steps.append(_step(posterior, best, ladder, shifts, "tried"))
    return steps


def _step(
    posterior: Posterior, candidate: Candidate, ladder: dict[float, Posterior], shifts: list[Shift], what: str
) -> Step:
    words = f"validation, {what}: {candidate.mean} mean, dispersion {candidate.score.dispersion:.3g}"
    there = ladder.get(candidate.scale) or scaled(posterior, candidate.scale)
    built = _built(posterior, candidate, shifts)
    evidence = float(there.log_evidence().detach())
    return step(-candidate.score.nll, built, words, scale=candidate.scale, evidence=evidence)
