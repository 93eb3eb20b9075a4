"""Groups that the data do not constrain (automatic relevance determination): γ_g → 0 and δ_g → its upper bound."""

from __future__ import annotations

import torch

from lapwing._types import Bool, Tensor
from lapwing.posterior import Posterior

_PRUNED = 1e-2  # effective dimensions below which a group is switched off
_LEAST_RISE = 1e-6  # increase of a log precision that is more than rounding


def switched_off(posterior: Posterior) -> Bool[Tensor, " g"]:
    return posterior.effective_dimension().detach() <= _PRUNED


def diverging(held: Posterior, wanted: Posterior) -> Bool[Tensor, " g"]:
    """Groups that are switched off and whose precision diverges; one round suffices to tell.

    For γ_g ≪ 1 the evidence is E_∞ − (tr H_g − ‖∇_g‖²)/2δ_g up to factors 1 + O(γ_g). The sign of its slope is
    therefore constant, unless the increase is as small as γ_g itself.
    """
    gamma = wanted.effective_dimension().detach()
    rise = (wanted.prior.precisions / held.prior.precisions).detach().log()
    return (gamma <= _PRUNED) & (rise > 2 * gamma + _LEAST_RISE)


def at_bounds(posterior: Posterior, groups: Bool[Tensor, " g"]) -> Posterior:
    _, high = posterior.precision_bounds()
    precisions = torch.where(groups, high, posterior.prior.precisions.detach())
    return posterior.with_prior(posterior.prior.with_precisions(precisions))


def any_diverging(posterior: Posterior) -> bool:
    """Whether a group that is switched off has not reached its bound."""
    _, high = posterior.precision_bounds()
    inside = posterior.prior.precisions.detach() < 0.99 * high
    return bool((inside & switched_off(posterior)).any())
