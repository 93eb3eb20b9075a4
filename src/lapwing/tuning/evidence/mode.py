"""The linear model's mode under a posterior's prior and noise, and how the two move together."""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError
from lapwing.linear_model import Design, Effort, Expansion, Problem, polished, solve_mode, solve_near
from lapwing.operators import Precision
from lapwing.posterior import Posterior
from lapwing.tuning.evidence.gradient import MOST_DIFFERENCES, twice_differentiable
from lapwing.tuning.evidence.variables import Variables, uphill
from lapwing.tuning.step import noise_is_free

MOST_RESPONSES = MOST_DIFFERENCES  # variables whose pull on the mode is solved for
_RESPONSE_RTOL = 1e-4

Hessian = Float[Tensor, "d d"]


def find_mode(posterior: Posterior, data: Design, effort: Effort, preconditioner: Precision | None = None) -> Expansion:
    """θ_* under the posterior's prior and noise, from where it was found last or from the trained weights."""
    problem = _problem(posterior, data)
    start = posterior.expansion
    if start is None or start.outputs is None:  # a posterior from a file knows θ_*, but not the data's outputs there
        start = Expansion(posterior.linearised.theta, posterior.estimate.statistics, follows=False)
    found = solve_mode(problem, start, preconditioner or posterior.precision.preconditioner(), effort)
    if found.statistics.n != posterior.n_data:
        raise InputError(
            f"tune got {found.statistics.n} data, but the posterior was fitted on {posterior.n_data} data, and the "
            "evidence is theirs. Pass the training data; held-out data go into validation=...."
        )
    return found


def find_mode_to_rounding(posterior: Posterior, data: Design, effort: Effort) -> Expansion:
    found = find_mode(posterior, data, effort)
    return polished(_problem(posterior, data), found, posterior.precision.preconditioner())


def both_moved(
    held: Posterior, wanted: Posterior, data: Design, noise: bool, *, estimates: bool = False
) -> tuple[Posterior, float, float, Hessian]:
    """Newton's step on E(z, θ_*(z)) from the pair that is held, on `wanted`; its length, its gain, and the Hessian.

    z are log precisions and log scales c_s of the noise. With the rows b of ∂²E/∂z∂θ, which are −δ_g E_g (θ_* − m₀) and
    c_s ∇ℓ_s, the mode moves by C b_k per unit of z_k, where C⁻¹ is the linear model's own Hessian. So the Hessian is
    that at a fixed mode, and B C Bᵀ.
    """
    now, gradient, at_fixed_mode = _derivatives(held, noise, estimates)
    hessian = at_fixed_mode + _through_the_mode(held, data, now.tune_noise)
    moved = now.moved(uphill(gradient, hessian, now.free(gradient)))
    move = moved.z - now.z
    return moved.on(wanted), float(move.abs().max()), float(gradient @ move), hessian


def settled(held: Posterior, noise: bool, hessian: Hessian) -> Posterior:
    """The last step once more, with the Hessian it had: from a pair at rest to its last digits.

    Newton's step leaves the error of its length times that of its Hessian, _RESPONSE_RTOL; here that is squared.
    """
    now, gradient, _ = _derivatives(held, noise)
    return now.moved(uphill(gradient, hessian, now.free(gradient))).on(held)


def _derivatives(
    held: Posterior, noise: bool, estimates: bool = False
) -> tuple[Variables, Float[Tensor, " d"], Hessian]:
    """Those of E at a fixed mode."""
    now = Variables.of(held, noise and noise_is_free(held))
    target = twice_differentiable(held, now.tune_noise, estimates=estimates)
    assert target is not None  # variables are few
    return now, *target.derivatives(now.u, now.w)


def _through_the_mode(held: Posterior, data: Design, tune_noise: bool) -> Hessian:
    """B C Bᵀ, by a factorisation, or by conjugate gradients to a few digits."""
    at, prior = held.expansion, held.prior
    assert at is not None
    pull = prior.P0.diagonal * (at.theta - prior.mean)
    scales = held.likelihood_scale.detach() * held.likelihood.part_scales().detach()
    from_data = scales.to(pull)[:, None] * at.statistics.gradients
    groups = [-pull * (prior.index == g) for g in range(prior.P0.n_groups)]
    B = torch.stack([*groups, *(from_data if tune_noise else torch.zeros_like(from_data))])
    problem, preconditioner = _problem(held, data), held.precision.preconditioner()
    return B @ solve_near(problem, at, B, preconditioner, _RESPONSE_RTOL).T


def _problem(posterior: Posterior, data: Design) -> Problem:
    kappa = float(posterior.likelihood_scale.detach())
    return Problem(data, posterior.likelihood, posterior.sites, kappa, posterior.prior)
