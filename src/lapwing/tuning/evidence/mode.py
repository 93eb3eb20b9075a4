"""The linear model's mode under a posterior's prior and noise, and its dependence on the hyperparameters."""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError
from lapwing.linear_model import Design, Expansion, Problem, StoppingRule, polished, solve_hessian, solve_mode
from lapwing.operators import Precision
from lapwing.posterior import Posterior
from lapwing.tuning.evidence.gradient import MOST_DIFFERENCES, twice_differentiable
from lapwing.tuning.evidence.variables import Variables, ascent_direction
from lapwing.tuning.step import noise_is_free

MOST_RESPONSES = MOST_DIFFERENCES  # hyperparameters up to which the response of the mode is computed
_RESPONSE_RTOL = 1e-4  # of the linear systems for the response of the mode

Hessian = Float[Tensor, "d d"]


def find_mode(
    posterior: Posterior, data: Design, stopping: StoppingRule, preconditioner: Precision | None = None
) -> Expansion:
    """θ_* under the posterior's prior and noise, starting from the last mode found, or the trained weights."""
    problem = _problem(posterior, data)
    start = posterior.expansion
    if start is None or start.outputs is None:  # a file stores θ_*, but not the outputs on the data
        start = Expansion(posterior.linearised.theta, posterior.estimate.statistics, follows=False)
    found = solve_mode(problem, start, preconditioner or posterior.precision.preconditioner(), stopping)
    if found.statistics.n != posterior.n_data:
        raise InputError(
            f"tune got {found.statistics.n} data, but the posterior was fitted on {posterior.n_data} data, and the "
            "evidence is theirs. Pass the training data; held-out data go into validation=...."
        )
    return found


def find_mode_to_rounding(posterior: Posterior, data: Design, stopping: StoppingRule) -> Expansion:
    found = find_mode(posterior, data, stopping)
    return polished(_problem(posterior, data), found, posterior.precision.preconditioner())


def joint_newton_step(
    held: Posterior, wanted: Posterior, data: Design, noise: bool, *, estimates: bool = False
) -> tuple[Posterior, float, float, Hessian]:
    """A Newton step on E(z, θ_*(z)), applied to `wanted`; its length, its gain, and the Hessian.

    z are log precisions and log scales c_s of the noise. ∂²E/∂z∂θ has rows b: −δ_g E_g (θ_* − m₀) and c_s ∇ℓ_s. The
    mode moves by C b_k per unit of z_k, where C⁻¹ is the linear model's own Hessian. So the Hessian of E(z, θ_*(z)) is
    that at a fixed mode plus B C Bᵀ.
    """
    now, gradient, at_fixed_mode = _derivatives(held, noise, estimates)
    hessian = at_fixed_mode + _mode_response(held, data, now.tune_noise)
    moved = now.moved(ascent_direction(gradient, hessian, now.free(gradient)))
    move = moved.z - now.z
    return moved.on(wanted), float(move.abs().max()), float(gradient @ move), hessian


def last_newton_step(held: Posterior, noise: bool, hessian: Hessian) -> Posterior:
    """A final Newton step with the Hessian of the last one, after convergence.

    A Newton step has an error of its length times that of the Hessian, _RESPONSE_RTOL; a second one squares that
    factor.
    """
    now, gradient, _ = _derivatives(held, noise)
    return now.moved(ascent_direction(gradient, hessian, now.free(gradient))).on(held)


def _derivatives(
    held: Posterior, noise: bool, estimates: bool = False
) -> tuple[Variables, Float[Tensor, " d"], Hessian]:
    """Gradient and Hessian of E at a fixed mode."""
    now = Variables.of(held, noise and noise_is_free(held))
    target = twice_differentiable(held, now.tune_noise, estimates=estimates)
    assert target is not None  # variables are few
    return now, *target.derivatives(now.u, now.w)


def _mode_response(held: Posterior, data: Design, tune_noise: bool) -> Hessian:
    """B C Bᵀ, by factorisation, or by conjugate gradients to a few digits."""
    at, prior = held.expansion, held.prior
    assert at is not None
    prior_gradient = prior.P0.diagonal * (at.theta - prior.mean)
    scales = held.likelihood_scale.detach() * held.likelihood.part_scales().detach()
    from_data = scales.to(prior_gradient)[:, None] * at.statistics.gradients
    groups = [-prior_gradient * (prior.index == g) for g in range(prior.P0.n_groups)]
    B = torch.stack([*groups, *(from_data if tune_noise else torch.zeros_like(from_data))])
    problem, preconditioner = _problem(held, data), held.precision.preconditioner()
    return B @ solve_hessian(problem, at, B, preconditioner, _RESPONSE_RTOL).T


def _problem(posterior: Posterior, data: Design) -> Problem:
    kappa = float(posterior.likelihood_scale.detach())
    return Problem(data, posterior.likelihood, posterior.sites, kappa, posterior.prior)
