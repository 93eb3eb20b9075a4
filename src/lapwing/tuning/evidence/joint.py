"""The evidence at the linear model's own mode: a joint stationary point of θ_* and the hyperparameters.

With a Gaussian likelihood and the full curvature the mode is a closed form of the hyperparameters, and one ascent finds
both. Otherwise they take turns: θ_* with the hyperparameters held, the hyperparameters with θ_* held, until nothing
moves; where J is at hand, a Newton step on both in between makes the turns few, and their end sharp. Because
∂E/∂θ = 0 at θ_*, the pairs at rest are the stationary points of the evidence. Antorán et al. (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Protocol

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import NOT_KEPT, Exact, Keeper
from lapwing.errors import InputError
from lapwing.likelihoods import Gaussian
from lapwing.linear_model import PRECISE, Design, Effort, Expansion
from lapwing.posterior import Posterior
from lapwing.tuning.budget import EXACT, Budget
from lapwing.tuning.evidence import relevance
from lapwing.tuning.evidence.anderson import Anderson
from lapwing.tuning.evidence.fixed_point import iterate_fixed_point, take_fixed_point_steps
from lapwing.tuning.evidence.gradient import ROUGH, maximise_evidence
from lapwing.tuning.evidence.mode import (
    MOST_RESPONSES,
    both_moved,
    find_mode,
    find_mode_to_rounding,
    settled,
)
from lapwing.tuning.evidence.position import Stage, Turns
from lapwing.tuning.step import noise_is_free, noise_of, step, with_noise

_TINY = 1 << 18  # entries of J up to which the mode is found to rounding: fractions of a second
_CLOSE = Effort(1e-5, 30, 60)  # without float64 the network's own products have seven digits at most
_PASSES_OF_A_PRODUCT = 1.7  # tangents forward and cotangents back, in passes of a gradient
_PASSES_OF_A_ROUND = 10.0  # with fewer products the mode is too far off for more rounds to help
_MOST_ROUNDS = 5
_BETWEEN = 0.5  # nats: how far hyperparameters are taken under a mode that is found anew right after
_MOST_CURVATURES, _CURVATURE_RTOL = 5, 1e-2
_DRIFT = 1e-5  # nats per round, below which groups that are switched off are let go


class Ascent(Protocol):
    """Hyperparameters for a fixed expansion."""

    def __call__(self, posterior: Posterior, *, noise: bool) -> Posterior: ...


@dataclass(frozen=True)
class LinearTuning:
    """How long to alternate, and how closely each mode is found."""

    most_rounds: int
    rtol: float  # largest change of a log precision or log noise that counts as rest
    effort: Effort
    memory: int  # rounds that Anderson's acceleration looks back on
    enough: float = 0.0  # nats: a round that gains less than this is the last

    @classmethod
    def of(cls, design: Design, posterior: Posterior, budget: Budget) -> LinearTuning:
        """To rounding if asked for, or if that takes no time; else until the evidence cannot tell the difference.

        The evidence determines a log precision to about √(2/γ_g), so that to solve for its mode much further gains
        nothing. By products with J, a few passes over the data.
        """
        precise = posterior.curvature.precise
        if design.precise and (budget.exact or (_is_tiny(posterior) and not budget.only_shape)):
            return cls(60, 1e-7, PRECISE, 5) if precise else cls(20, 1e-2, PRECISE, 0)
        if design.direct(posterior.sites, posterior.prior.P0) is not None:
            rounds, enough = (1, _BETWEEN) if budget.only_shape else (12, ROUGH)
            return cls(rounds, 1e-2, Effort(1e-3, 10, 2, budget.over), 5 if precise else 0, enough)
        if budget.exact:
            return cls(20, 1e-3, _CLOSE, 0)
        rounds = max(1, min(_MOST_ROUNDS, int(budget.passes // _PASSES_OF_A_ROUND)))
        products = max(1, int((min(budget.passes, 1e3) / rounds - 1) / _PASSES_OF_A_PRODUCT))
        return cls(rounds, 0.05, Effort(1e-2, 1, products, budget.over), 0, ROUGH)


def tune_at_linear_mode(
    posterior: Posterior,
    ascend: Ascent,
    design: Callable[[], Design] | None,
    *,
    noise: bool,
    recurved: Callable[[Posterior], Posterior] | None = None,
    keeper: Keeper = NOT_KEPT,
    budget: Budget = EXACT,
) -> Posterior:
    """Alternate until θ_* and the hyperparameters stand still; in one go where the mode follows them exactly.

    `recurved` gives the posterior its curvature anew, at the outputs of the linear mode: the Laplace approximation of
    the linear model itself. Without it the curvature stays the network's, and is computed once. `keeper` writes down
    how far it is between two turns, and takes it up again.
    """
    if quadratic_is_exact(posterior):
        start = Expansion(posterior.linearised.theta, posterior.estimate.statistics, follows=True)
        return at_leisure(ascend, posterior, budget)(replace(posterior, expansion=start), noise=noise)
    if design is None:
        raise InputError(
            'tune(mode="linear") looks for the linear model\'s own mode, and needs the training data for it: '
            'lw.tune(posterior, data). mode="network" takes the trained weights instead, and needs none.'
        )
    data = design()
    found = keeper.resumed()
    if found is None or found["stage"] == 0:
        current = _alternated(posterior, ascend, data, noise, Stage(keeper, found=found), budget)
        found = None
    else:
        current = found["before"].on(posterior)
    if recurved is None:
        return current
    for number in range(1 if found is None else found["stage"], 1 + _MOST_CURVATURES):
        stage, found = Stage(keeper, number, current, found), None
        moved = _alternated(recurved(current), ascend, data, noise, stage, budget)
        change, current = _change(current, moved), moved
        if change < _CURVATURE_RTOL:
            break
    return current


def at_leisure(ascend: Ascent, posterior: Posterior, budget: Budget) -> Ascent:
    """To rounding if asked for, or if that takes no time; only to a shape where held-out data choose the scale."""
    if budget.only_shape:
        return roughly(ascend, _BETWEEN)
    return ascend if budget.exact or _is_tiny(posterior) else roughly(ascend, ROUGH)


def _is_tiny(posterior: Posterior) -> bool:
    return posterior.n_data * posterior.linearised.k * posterior.layout.p <= _TINY


def roughly(ascend: Ascent, enough: float) -> Ascent:
    """The same ascent, ended where fewer nats than this are left to gain."""
    return partial(maximise_evidence, enough=enough) if enough and ascend is maximise_evidence else ascend


def _alternated(
    posterior: Posterior, ascend: Ascent, data: Design, noise: bool, stage: Stage, budget: Budget
) -> Posterior:
    """θ_* and the hyperparameters in turns, on one curvature."""
    plan = LinearTuning.of(data, posterior, budget)
    # θ_* moves in any case: MacKay's updates need not stand still in between.
    if ascend is iterate_fixed_point or not posterior.curvature.precise:
        ascend = take_fixed_point_steps
    newton = plan.memory > 0 and ascend is maximise_evidence and len(logs(posterior)) <= MOST_RESPONSES
    ascend = roughly(ascend, _BETWEEN if newton and plan.enough else plan.enough)
    at = Turns.begun(posterior, plan.memory)
    if stage.found is not None:
        at.restore(stage.found)
    while at.number < plan.most_rounds and not (at.number and budget.over()):
        stage.offer(at.state)
        at.number += 1
        held = replace(at.current, expansion=find_mode(at.current, data, plan.effort))
        wanted = ascend(held, noise=noise)
        # Turns raise the evidence of the pair every time; a point that an extrapolation has lowered it at is given up.
        here = wanted.history[len(held.history)].score
        if here < at.reached - 1e-9 * abs(at.reached) and plan.memory:
            at.mixing, at.current, at.reached = Anderson(plan.memory), at.plain, -inf
            continue
        at.plain, gain, at.reached = wanted, here - at.reached, here
        if plan.memory and bool((off := relevance.rising(held, wanted) & ~at.let_go).any()):
            at.let_go, at.mixing = at.let_go | off, Anderson(plan.memory)
            at.current = relevance.at_their_bounds(wanted, off)
            continue
        if newton:
            at.current, change, gain, hessian = both_moved(held, wanted, data, noise, estimates=plan.enough > 0)
            if gain < plan.enough:
                at.plain = at.current
                break
            if change < plan.rtol and not plan.enough:
                rest = replace(at.current, expansion=find_mode_to_rounding(at.current, data, plan.effort))
                at.plain = settled(rest, noise, hessian)
        else:
            at.current = moved_to(wanted, at.mixing.next(logs(held), logs(wanted)))
            change = _change(held, wanted)
        if change < plan.rtol or (gain < _DRIFT and relevance.drifts(wanted)):
            break
    plain = at.plain
    if plan.memory == 0:
        return plain
    find = find_mode if plan.enough else find_mode_to_rounding
    return _expanded(plain, find(plain, data, plan.effort))


def quadratic_is_exact(posterior: Posterior) -> bool:
    """A Gaussian likelihood with its full curvature: the log likelihood of the linear model is the quadratic."""
    full = posterior.structure.exact and isinstance(posterior.fisher, Exact)
    return full and isinstance(posterior.likelihood, Gaussian)


def _expanded(posterior: Posterior, expansion: Expansion) -> Posterior:
    moved = replace(posterior, expansion=expansion)
    return replace(moved, history=(*posterior.history, step(moved.log_evidence().detach(), moved, "linear mode")))


def _change(before: Posterior, after: Posterior) -> float:
    """The largest change of a log; groups that the data switch off drift on without end, and are not waited for."""
    counts = torch.cat([~relevance.switched_off(after), torch.ones_like(noise_of(after), dtype=torch.bool)])
    return float((logs(after) - logs(before)).abs()[counts].max()) if bool(counts.any()) else 0.0


def logs(posterior: Posterior) -> Float[Tensor, " d"]:
    """What is being tuned: log precisions and log noise."""
    return torch.cat(
        [posterior.prior.precisions.detach().log(), noise_of(posterior).log().to(posterior.prior.index.device)]
    )


def moved_to(posterior: Posterior, values: Float[Tensor, " d"]) -> Posterior:
    low, high = posterior.precision_bounds()
    n = len(posterior.prior.precisions)
    precisions = values[:n].exp().clamp(min=low, max=high)
    moved = posterior.with_prior(posterior.prior.with_precisions(precisions))
    if not noise_is_free(posterior):
        return moved
    least, most = posterior.noise_bounds()
    return with_noise(moved, values[n:].exp().clamp(min=least, max=most))
