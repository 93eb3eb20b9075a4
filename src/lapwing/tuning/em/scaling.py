"""The precisions that EM changes: one α per prior group, times a fixed weight of each parameter for a g-prior."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing import priors
from lapwing._types import Float, Tensor
from lapwing.posterior import Posterior
from lapwing.posterior.diagnosis import PRECISION_BOUNDS
from lapwing.priors import GaussianPrior

_LEAST_WEIGHT = 1e-8  # smallest g-prior weight relative to the mean: weights without curvature would have no prior


@dataclass(frozen=True, eq=False)
class Scaling:
    """δ_p = α_g(p) w_p, where g(p) is the group of p. w = 1 except for a g-prior."""

    groups: GaussianPrior
    weights: Float[Tensor, " p"] | None = None
    n_dead: int = 0  # parameters whose weight was raised to the minimum

    @classmethod
    def g_prior(cls, groups: GaussianPrior, diagonal: Float[Tensor, " p"]) -> Scaling:
        """w = diag H; the initial α of each group keeps its mean log precision."""
        least = _LEAST_WEIGHT * diagonal.mean()
        weights = torch.maximum(diagonal, least)
        log_hyperparameters = groups.P0.group_sums(weights.log()) / groups.P0.sizes
        started = groups.with_precisions(groups.precisions.detach() / log_hyperparameters.exp())
        return cls(started, weights, int((diagonal < least).sum()))

    @property
    def alphas(self) -> Float[Tensor, " g"]:
        return self.groups.precisions.detach()

    def sums(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... g"]:
        """Sum over each group."""
        P0 = self.groups.P0
        return v.new_zeros(*v.shape[:-1], P0.n_groups).index_add(-1, P0.index, v)

    def scatter(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " g"]:
        """Σ w (θ − m₀)² within each group."""
        squares = (theta - self.groups.mean) ** 2
        return self.sums(squares if self.weights is None else self.weights * squares)

    def moved(self, alphas: Float[Tensor, " g"]) -> Scaling:
        return Scaling(self.groups.with_precisions(alphas), self.weights, self.n_dead)

    def applied(self, posterior: Posterior) -> Posterior:
        """The posterior with this prior."""
        if self.weights is None:
            return posterior.with_prior(self.groups)
        precisions = self.groups.P0.diagonal.detach() * self.weights
        each = priors.elementwise(self.groups.layout, precisions, self.groups.mean)
        return posterior.with_prior(each)

    def bounds(self, diagonal: Float[Tensor, " p"]) -> tuple[Float[Tensor, " g"], Float[Tensor, " g"]]:
        """Like `Posterior.precision_bounds`, relative to the mean of H_pp / w_p in each group."""
        ratio = diagonal if self.weights is None else diagonal / self.weights
        mean = self.sums(ratio) / self.groups.P0.sizes
        mean = torch.where(mean > 0, mean, torch.ones_like(mean))
        return PRECISION_BOUNDS[0] * mean, PRECISION_BOUNDS[1] * mean
