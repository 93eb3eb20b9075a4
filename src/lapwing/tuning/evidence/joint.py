"""The evidence at the linear model's mode: a joint stationary point of θ_* and the hyperparameters.

With a Gaussian likelihood and full curvature the mode is a closed form of the hyperparameters, and one optimisation
finds both. Otherwise they alternate: θ_* with hyperparameters fixed, then hyperparameters with θ_* fixed, until both
have converged. If J is stored, a Newton step in both jointly reduces the number of alternations and converges
quadratically. Because ∂E/∂θ = 0 at θ_*, the limits are the stationary points of the evidence. Antorán et al. (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Protocol

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import NO_CHECKPOINT, Exact, PassCheckpoint
from lapwing.errors import InputError
from lapwing.likelihoods import Gaussian
from lapwing.linear_model import PRECISE, Design, Expansion, StoppingRule
from lapwing.posterior import Posterior
from lapwing.tuning.budget import EXACT, Budget
from lapwing.tuning.evidence import relevance
from lapwing.tuning.evidence.anderson import Anderson
from lapwing.tuning.evidence.fixed_point import iterate_fixed_point, take_fixed_point_steps
from lapwing.tuning.evidence.gradient import GAIN_TOLERANCE, maximise_evidence
from lapwing.tuning.evidence.mode import (
    MOST_RESPONSES,
    find_mode,
    find_mode_to_rounding,
    joint_newton_step,
    last_newton_step,
)
from lapwing.tuning.evidence.state import AlternationState, Stage
from lapwing.tuning.step import noise_is_free, noise_of, step, with_noise

_TINY = 1 << 18  # entries of J up to which the default solves to rounding, in a fraction of a second
_STREAMED = StoppingRule(1e-5, 30, 60)  # float32 products have about seven digits
_PASSES_OF_A_PRODUCT = 1.7  # JVP and VJP, in units of a gradient pass
_PASSES_OF_A_ROUND = 10.0  # with fewer products the mode is too far off for more rounds to help
_MOST_ROUNDS = 5
_INTERIM_GAIN = 0.5  # nats: tolerance for hyperparameters while the mode is about to change
_MOST_CURVATURES, _CURVATURE_RTOL = 5, 1e-2  # re-estimations of the curvature, and change of a log that ends them
_DRIFT = 1e-5  # nats per round, below which diverging precisions are ignored


class Ascent(Protocol):
    """A method that chooses hyperparameters for a fixed expansion."""

    def __call__(self, posterior: Posterior, *, noise: bool) -> Posterior: ...


@dataclass(frozen=True)
class LinearTuning:
    """How many alternations, and how accurately each mode is computed."""

    most_rounds: int
    rtol: float  # change of a log precision or log noise at which it has converged
    stopping: StoppingRule
    memory: int  # depth of the Anderson acceleration
    enough: float = 0.0  # nats: stop after a round that gains less

    @classmethod
    def of(cls, design: Design, posterior: Posterior, budget: Budget) -> LinearTuning:
        """To rounding if requested or if that is instant; else to the accuracy that the evidence can resolve.

        The evidence determines a log precision to about √(2/γ_g) only, so a more accurate maximum is no better. For
        streamed products with J, a few passes over the data.
        """
        precise = posterior.curvature.precise
        if design.precise and (budget.exact or (_is_tiny(posterior) and not budget.only_shape)):
            return cls(60, 1e-7, PRECISE, 5) if precise else cls(20, 1e-2, PRECISE, 0)
        if design.direct(posterior.sites, posterior.prior.P0) is not None:
            rounds, enough = (1, _INTERIM_GAIN) if budget.only_shape else (12, GAIN_TOLERANCE)
            return cls(rounds, 1e-2, StoppingRule(1e-3, 10, 2, budget.over), 5 if precise else 0, enough)
        if budget.exact:
            return cls(20, 1e-3, _STREAMED, 0)
        rounds = max(1, min(_MOST_ROUNDS, int(budget.passes // _PASSES_OF_A_ROUND)))
        products = max(1, int((min(budget.passes, 1e3) / rounds - 1) / _PASSES_OF_A_PRODUCT))
        return cls(rounds, 0.05, StoppingRule(1e-2, 1, products, budget.over), 0, GAIN_TOLERANCE)


def tune_at_linear_mode(
    posterior: Posterior,
    ascend: Ascent,
    design: Callable[[], Design] | None,
    *,
    noise: bool,
    reestimated: Callable[[Posterior], Posterior] | None = None,
    checkpoint: PassCheckpoint = NO_CHECKPOINT,
    budget: Budget = EXACT,
) -> Posterior:
    """Alternate until θ_* and the hyperparameters have converged; a single optimisation if the mode follows exactly.

    `reestimated` re-estimates the curvature at the outputs of the linear mode, for the Laplace approximation of the
    linear model itself. Without it the curvature remains that at the network's outputs. `checkpoint` stores the state
    between two alternations, and resumes from it.
    """
    if quadratic_is_exact(posterior):
        start = Expansion(posterior.linearised.theta, posterior.estimate.statistics, follows=True)
        return with_tolerance(ascend, posterior, budget)(replace(posterior, expansion=start), noise=noise)
    if design is None:
        raise InputError(
            'tune(mode="linear") looks for the linear model\'s own mode, and needs the training data for it: '
            'lw.tune(posterior, data). mode="network" takes the trained weights instead, and needs none.'
        )
    data = design()
    found = checkpoint.resumed()
    if found is None or found["stage"] == 0:
        current = _alternated(posterior, ascend, data, noise, Stage(checkpoint, found=found), budget)
        found = None
    else:
        current = found["before"].on(posterior)
    if reestimated is None:
        return current
    for number in range(1 if found is None else found["stage"], 1 + _MOST_CURVATURES):
        stage, found = Stage(checkpoint, number, current, found), None
        moved = _alternated(reestimated(current), ascend, data, noise, stage, budget)
        change, current = _change(current, moved), moved
        if change < _CURVATURE_RTOL:
            break
    return current


def with_tolerance(ascend: Ascent, posterior: Posterior, budget: Budget) -> Ascent:
    """To rounding if requested or instant; coarsely if held-out data choose the scale; else to GAIN_TOLERANCE."""
    if budget.only_shape:
        return stopped_early(ascend, _INTERIM_GAIN)
    return ascend if budget.exact or _is_tiny(posterior) else stopped_early(ascend, GAIN_TOLERANCE)


def _is_tiny(posterior: Posterior) -> bool:
    return posterior.n_data * posterior.linearised.k * posterior.layout.p <= _TINY


def stopped_early(ascend: Ascent, enough: float) -> Ascent:
    """The same method, stopped when less than `enough` nats remain to be gained."""
    return partial(maximise_evidence, enough=enough) if enough and ascend is maximise_evidence else ascend


def _alternated(
    posterior: Posterior, ascend: Ascent, data: Design, noise: bool, stage: Stage, budget: Budget
) -> Posterior:
    """Alternate between θ_* and the hyperparameters, with the curvature fixed."""
    plan = LinearTuning.of(data, posterior, budget)
    # θ_* moves in between, so MacKay's updates need not converge each time.
    if ascend is iterate_fixed_point or not posterior.curvature.precise:
        ascend = take_fixed_point_steps
    newton = plan.memory > 0 and ascend is maximise_evidence and len(log_hyperparameters(posterior)) <= MOST_RESPONSES
    ascend = stopped_early(ascend, _INTERIM_GAIN if newton and plan.enough else plan.enough)
    at = AlternationState.initial(posterior, plan.memory)
    if stage.found is not None:
        at.restore(stage.found)
    while at.number < plan.most_rounds and not (at.number and budget.over()):
        stage.offer(at.state)
        at.number += 1
        held = replace(at.current, expansion=find_mode(at.current, data, plan.stopping))
        wanted = ascend(held, noise=noise)
        # Plain alternation increases the evidence in every round. If it decreased, discard the extrapolated point.
        here = wanted.history[len(held.history)].score
        if here < at.reached - 1e-9 * abs(at.reached) and plan.memory:
            at.acceleration, at.current, at.reached = Anderson(plan.memory), at.plain, -inf
            continue
        at.plain, gain, at.reached = wanted, here - at.reached, here
        if plan.memory and bool((off := relevance.diverging(held, wanted) & ~at.pruned).any()):
            at.pruned, at.acceleration = at.pruned | off, Anderson(plan.memory)
            at.current = relevance.at_bounds(wanted, off)
            continue
        if newton:
            at.current, change, gain, hessian = joint_newton_step(held, wanted, data, noise, estimates=plan.enough > 0)
            if gain < plan.enough:
                at.plain = at.current
                break
            if change < plan.rtol and not plan.enough:
                rest = replace(at.current, expansion=find_mode_to_rounding(at.current, data, plan.stopping))
                at.plain = last_newton_step(rest, noise, hessian)
        else:
            at.current = moved_to(wanted, at.acceleration.next(log_hyperparameters(held), log_hyperparameters(wanted)))
            change = _change(held, wanted)
        if change < plan.rtol or (gain < _DRIFT and relevance.any_diverging(wanted)):
            break
    plain = at.plain
    if plan.memory == 0:
        return plain
    find = find_mode if plan.enough else find_mode_to_rounding
    return _expanded(plain, find(plain, data, plan.stopping))


def quadratic_is_exact(posterior: Posterior) -> bool:
    """Gaussian likelihood with full curvature: the quadratic expansion of the log likelihood is exact."""
    full = posterior.structure.exact and isinstance(posterior.fisher, Exact)
    return full and isinstance(posterior.likelihood, Gaussian)


def _expanded(posterior: Posterior, expansion: Expansion) -> Posterior:
    moved = replace(posterior, expansion=expansion)
    return replace(moved, history=(*posterior.history, step(moved.log_evidence().detach(), moved, "linear mode")))


def _change(before: Posterior, after: Posterior) -> float:
    """Largest change of a log, without groups that are switched off: they diverge to their bound."""
    counts = torch.cat([~relevance.switched_off(after), torch.ones_like(noise_of(after), dtype=torch.bool)])
    return (
        float((log_hyperparameters(after) - log_hyperparameters(before)).abs()[counts].max())
        if bool(counts.any())
        else 0.0
    )


def log_hyperparameters(posterior: Posterior) -> Float[Tensor, " d"]:
    """The variables of the optimisation: log precisions and log noise."""
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
