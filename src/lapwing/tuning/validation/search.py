"""Hyperparameters by held-out data: predictive NLL decides what the evidence leaves open.

The evidence determines the relative precisions of the prior. Held-out data determine a few numbers: the overall scale,
the noise or temperature, the mean and the link. The plain and the temperature-scaled network are among the candidates,
and no candidate with a higher NLL is chosen.

A small held-out set cannot distinguish many candidates, and the best of many is best partly by chance. Therefore
scales are averaged by their held-out likelihood, the mean is moved only for a gain beyond its standard error, and each
number has a weak prior worth a few nats: a scale within some decades of the evidence's, T and the noise factor near
one (T > 1 only together with a covariance), the exact link. About a hundred held-out data overrule it if there is
something to gain. If not, error bars that reflect epistemic uncertainty are kept.
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
from lapwing.tuning.validation.scoring import Freedom, HeldOutScore, final_scores, quick_scores, row_scores
from lapwing.tuning.validation.some_outputs import plain

NETWORK_SCALE = 1e12  # scale at which the posterior equals the network, to rounding
GRID = torch.tensor([*(10 ** (k / 2) for k in range(-6, 11)), 1e6, 1e7], dtype=torch.float64)
MOST_CONFIRMED = 1_024  # held-out inputs on which the best candidate is compared with the network
_FINALISTS = 6  # candidates that are also scored with the accurate link
_MANY = 1_000  # rows or parameters above which the grid of scales is coarser

# Nats of the weak priors: a candidate must gain as much on all held-out data together to be preferred.
_COST_OF_MEAN = {"network": 0.0, "newton": 1.0, "quarter step": 1.0, "half step": 1.0, "step": 2.0}
_COST_OF_MEAN |= {"half": 1.0, "linear": 2.0}
_COST_OF_LINK = 0.5
_SCALE_STD = 2.0  # decades: the evidence is often wrong, but rarely by more
_DECADES_OF_NETWORK = 8.0  # distance of the plain network from the evidence's scale, for the prior
_TIE = 1e-6  # nats per term, below which NLLs count as equal
_STANDARD_ERRORS = 0.5  # subtracted from a gain on held-out data
_STD_OF_NOISE = 0.25  # of the log factor of a Gaussian's variances: as informative as 32 data
_STD_ABOVE_ONE = 0.5  # of log T > 0 with a covariance, which already makes predictions less confident
_STD_BELOW_ONE = 0.2  # of log T < 0: without any error, labels do not limit how small T can get


@dataclass(frozen=True)
class Candidate:
    """One way to compute predictions with a posterior, and its held-out score."""

    scale_index: int
    scale: float
    mean: str
    score: HeldOutScore

    @property
    def cost(self) -> float:
        """Nats of the weak priors."""
        link = 0.0 if self.score.link == DEFAULT else _COST_OF_LINK
        decades = min(abs(log10(self.scale)), _DECADES_OF_NETWORK)
        return _COST_OF_MEAN[self.mean] + self.score.cost + link + 0.5 * (decades / _SCALE_STD) ** 2


def search_validation(
    posterior: Posterior, held_out: Batches, *, noise: bool, keep_mean: bool = False, progress: bool | None = None
) -> Posterior:
    """The candidate with the best held-out score. Needs no pass over the training data.

    Scales and means are compared on a few hundred inputs. The best is compared with the network, and its noise or
    temperature optimised, on up to about a thousand. If a datum has many outputs, a few hundred likelihood terms
    decide, and the predictions of the best candidate are compared with the network's.
    """
    network = replace(posterior, readout=Readout())
    free = noise and noise_is_free(posterior)
    by_scale = {s: scaled(network, s) for s in _grid(network)}
    by_scale, shifts = _shifts(network, by_scale, keep_mean)
    precisions = [each.precision for each in by_scale.values()]
    data = HeldOut.of(network, held_out, precisions, shifts, MOST_COMPARED, progress)
    candidates = _all_candidates(network, data, list(by_scale), free)
    best = averaged(candidates, partial(_rows, data))
    if network.averages_functions:
        alone = _preferred(_network_candidates(candidates), data.n_terms)
        taken = best if _no_worse(_posterior_of(network, best, shifts), alone, held_out) else alone
    else:
        taken = _confirmed(network, best, by_scale, shifts, held_out, free, progress)
    chosen = _posterior_of(network, taken, shifts)
    steps = [*_steps(network, candidates, by_scale, shifts), _step(network, taken, by_scale, shifts, "taken")]
    return replace(chosen, history=(*posterior.history, *steps))


def _grid(posterior: Posterior) -> list[float]:
    """Half decades; whole decades if a factorisation per scale would need too much time or memory.

    Whole decades also for many outputs, of which only some are compared.
    """
    side = min(posterior.layout.p, posterior.n_data * posterior.linearised.k)
    dense = isinstance(posterior.curvature, DenseCurvature | LowRankCurvature)
    scales = GRID.tolist()
    large = side > _MANY or len(scales) * side**2 > 3 * posterior.chunk_floats
    return scales[::2] if (dense and large) or posterior.averages_functions else scales


def _shifts(
    posterior: Posterior, by_scale: dict[float, Posterior], keep_mean: bool
) -> tuple[dict[float, Posterior], list[Shift]]:
    """The scales at which the precision is not lost in rounding, and directions in which the mean may move."""
    shifts: list[Shift] = []
    if not posterior.precision.has_weights or posterior.averages_functions:
        return by_scale, shifts
    room = 2 * len(by_scale) * posterior.layout.p <= 3 * posterior.chunk_floats
    if room and not keep_mean:
        steps = {s: found for s, each in by_scale.items() if (found := _newton_steps(each)) is not None}
        by_scale = {s: by_scale[s] for s in steps}
        newton, towards_mode = (torch.stack(each) for each in zip(*steps.values(), strict=True))
        shifts.append(Shift({"newton": 1.0}, newton))
        shifts.append(Shift({"quarter step": 0.25, "half step": 0.5, "step": 1.0}, towards_mode))
    if posterior.expansion is not None and not keep_mean:
        mode = _resolved(posterior.linear_mode)
        if mode is not None:
            to_mode = (mode - posterior.linearised.theta).detach()[None]
            shifts.append(Shift({"half": 0.5, "linear": 1.0}, to_mode))
    return by_scale, shifts


def _resolved(solved: Callable[[], Tensor]) -> Tensor | None:
    """None if the prior is so weak that P is lost in rounding."""
    try:
        return solved()
    except NumericalError:
        return None


def _newton_steps(posterior: Posterior) -> tuple[Float[Tensor, " p"], Float[Tensor, " p"]] | None:
    """P⁻¹ g and P⁻¹ (g − P₀ (θ* − m₀)); None if the prior is so weak that P is lost in rounding."""
    data, prior = posterior.data_gradient(), posterior.prior
    pull = prior.P0.diagonal * (posterior.linearised.theta - prior.mean)
    solved = _resolved(lambda: posterior.precision.solve(torch.stack([data, data - pull])).detach())
    return None if solved is None else (solved[0], solved[1])


def _all_candidates(posterior: Posterior, data: HeldOut, scales: list[float], free: bool) -> list[Candidate]:
    """Score every mean at every scale with quick links, and the best few with the accurate link."""
    likelihood, targets = data.likelihood, data.targets
    candidates = [
        Candidate(i, s, name, score)
        for name in data.means
        for i, s in enumerate(scales)
        for score in quick_scores(likelihood, data.gaussian(name, i), targets, _freedom(s, free))
    ]
    alone = quick_scores(likelihood, data.alone, targets, _freedom(NETWORK_SCALE, free))
    candidates += [Candidate(len(scales), NETWORK_SCALE, "network", score) for score in alone]
    # Predictions that average draws of functions support the default link only.
    links = {DEFAULT} if posterior.averages_functions else {DEFAULT, *(c.score.link for c in candidates)}
    finalists = sorted(candidates, key=lambda c: c.score.nll)[:_FINALISTS]
    finalists += [c for c in candidates if c.scale == NETWORK_SCALE and c not in finalists]
    candidates += [
        replace(c, score=score)
        for c in finalists
        for score in final_scores(
            likelihood,
            data.alone if c.scale == NETWORK_SCALE else data.gaussian(c.mean, c.scale_index),
            targets,
            _freedom(c.scale, free),
            c.score,
        )
    ]
    return [c for c in candidates if c.score.link in links]


Rows = Callable[[Candidate], Float[Tensor, " n"]]


def averaged(candidates: list[Candidate], rows: Rows) -> Candidate:
    """The network's mean at the average log scale; or a candidate with another mean, if its gain is significant.

    The average is over candidates with the network's mean, with weights exp(−n · NLL − cost). The best of many scales
    on few data is best partly by chance; the average changes little where data carry little information. `rows` gives
    the log probability of every held-out term.
    """
    kept = [c for c in candidates if c.mean == "network"]
    n = len(rows(kept[0]))

    def total(c: Candidate) -> float:
        return n * c.score.nll + c.cost

    at_scale = [min((c for c in kept if c.scale == s), key=total) for s in sorted({c.scale for c in kept})]
    weights = torch.softmax(-torch.tensor([total(c) for c in at_scale], dtype=torch.float64), 0)
    decades = torch.tensor([min(log10(c.scale), _DECADES_OF_NETWORK) for c in at_scale], dtype=torch.float64)
    taken = at_scale[int((decades - weights @ decades).abs().argmin())]
    moved = [c for c in candidates if c.mean != "network"]
    if not moved:
        return taken
    sure = [_gain_lower_bound(rows(c) - rows(taken)) - c.cost + taken.score.cost for c in moved]
    best = max(range(len(moved)), key=sure.__getitem__)
    return moved[best] if sure[best] > 0 else taken


def _gain_lower_bound(d: Float[Tensor, " n"]) -> float:
    """Σ d minus half its standard error √n · std(d), for paired differences d of log probabilities."""
    return float(d.sum() - _STANDARD_ERRORS * d.std() * len(d) ** 0.5) if len(d) > 1 else -inf


def _rows(data: HeldOut, c: Candidate) -> Float[Tensor, " n"]:
    gaussian = data.alone if c.scale == NETWORK_SCALE else data.gaussian(c.mean, c.scale_index)
    return row_scores(data.likelihood, gaussian, data.targets, c.score)


def _confirmed(
    posterior: Posterior,
    best: Candidate,
    by_scale: dict[float, Posterior],
    shifts: list[Shift],
    held_out: Batches,
    free: bool,
    progress: bool | None,
) -> Candidate:
    """The best candidate if it is no worse than the network on more held-out data, with the dispersion optimised on
    them."""
    spread = best.scale != NETWORK_SCALE
    precisions = [by_scale[best.scale].precision] if spread else []
    ways = [
        Shift({best.mean: 1.0}, shift.weights_of(best.mean, best.scale_index)[None])
        for shift in shifts
        if best.mean in shift.lengths
    ]
    data = HeldOut.of(posterior, held_out, precisions, ways, MOST_CONFIRMED, progress)
    found = _all_candidates(posterior, data, [best.scale] if spread else [], free)
    found = [c for c in found if c.mean == best.mean or c.scale == NETWORK_SCALE]
    taken = _preferred(found, data.n_terms)
    return replace(taken, scale_index=best.scale_index * (taken.scale == best.scale))


def _network_candidates(candidates: list[Candidate]) -> list[Candidate]:
    return [c for c in candidates if c.scale == NETWORK_SCALE and c.mean == "network"]


def _no_worse(chosen: Posterior, alone: Candidate, held_out: Batches) -> bool:
    """Whether actual predictions are no worse than the network's at its best temperature.

    If a datum has many outputs, the scales were compared on some of them only.
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
    return Freedom(_STD_OF_NOISE * free_noise, _STD_BELOW_ONE, _STD_ABOVE_ONE if scale < NETWORK_SCALE else inf)


def _preferred(candidates: list[Candidate], n_terms: int) -> Candidate:
    """Least NLL plus cost, among candidates no worse than the plain and the temperature-scaled network."""
    alone = min(c.score.nll for c in _network_candidates(candidates))
    allowed = [c for c in candidates if c.score.nll <= alone + _TIE]
    return min(allowed, key=lambda c: n_terms * c.score.nll + c.cost)


def _posterior_of(posterior: Posterior, best: Candidate, shifts: list[Shift]) -> Posterior:
    """The posterior that the candidate describes."""
    moved = scaled(posterior, best.scale)
    shift = next((each.weights_of(best.mean, best.scale_index) for each in shifts if best.mean in each.lengths), None)
    if not isinstance(posterior.likelihood, Gaussian):
        return replace(moved, readout=Readout(shift, best.score.dispersion, best.score.link))
    # Noise and covariance both multiplied by a: the precision matrix divided by a.
    a = best.score.dispersion
    if a != 1.0:
        moved = with_noise(scaled(moved, 1 / a), noise_of(posterior) * a**0.5)
    return replace(moved, readout=Readout(shift))


def _steps(
    posterior: Posterior, candidates: list[Candidate], by_scale: dict[float, Posterior], shifts: list[Shift]
) -> list[Step]:
    """The best candidate at every scale together with the evidence there, to compare the two."""
    steps = []
    for i in sorted({c.scale_index for c in candidates}):
        best = min((c for c in candidates if c.scale_index == i), key=lambda c: c.score.nll)
        steps.append(_step(posterior, best, by_scale, shifts, "tried"))
    return steps


def _step(
    posterior: Posterior, candidate: Candidate, by_scale: dict[float, Posterior], shifts: list[Shift], what: str
) -> Step:
    words = f"validation, {what}: {candidate.mean} mean, dispersion {candidate.score.dispersion:.3g}"
    there = by_scale.get(candidate.scale) or scaled(posterior, candidate.scale)
    built = _posterior_of(posterior, candidate, shifts)
    evidence = float(there.log_evidence().detach())
    return step(-candidate.score.nll, built, words, scale=candidate.scale, evidence=evidence)
