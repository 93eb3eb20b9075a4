"""Hyperparameters by the evidence along the way: a fit, some gradient steps, and the best that was seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import NumericalError
from lapwing.posterior import Posterior
from lapwing.train.loop import AfterEpoch
from lapwing.train.penalised import PenalisedLikelihood
from lapwing.tuning.step import at, log_bounds, noise_is_free, noise_of

_LONGEST = 4.0  # nats of a log precision or noise in one update: early on the network is far from a mode


@dataclass(frozen=True)
class Ascent:
    """When the evidence is looked at, and how far it is climbed."""

    start: int
    every_epochs: int
    steps: int
    rate: float


class EvidenceAscent(AfterEpoch):
    """K steps of Adam on log precisions and log noise up the Laplace evidence at the present weights.

    The curvature is computed once an update, at unit noise; it does not depend on the hyperparameters. Algorithm 1 of
    Immer, Bauer, Fortuin, Rätsch and Khan (2021).
    """

    def __init__(self, loss: PenalisedLikelihood, fitted: Callable[[], Posterior], ascent: Ascent) -> None:
        self.loss, self.fitted, self.ascent = loss, fitted, ascent
        self.best: dict[str, Tensor] | None = None
        self.best_evidence = -float("inf")
        self.best_precisions = loss.prior.precisions
        self.moments: dict[str, Any] = {}

    def __call__(self, number: int) -> Mapping[str, Any]:
        ascent = self.ascent
        if number < ascent.start or (number + 1) % ascent.every_epochs:
            return {}
        posterior = self._climbed(self.fitted())
        evidence = float(posterior.log_evidence().detach())
        if not evidence - evidence == 0:
            raise NumericalError(f"epoch {number}: the evidence is {evidence}. Lower the rate, or start later.")
        self.loss.set_prior(posterior.prior)
        if noise_is_free(posterior):
            self.loss.set_noise(noise_of(posterior))
        if evidence > self.best_evidence:
            self.best_evidence, self.best_precisions = evidence, posterior.prior.precisions.detach()
            self.best = deepcopy(self.loss.state_dict())
        precisions = tuple(posterior.prior.precisions.detach().tolist())
        noise_std = tuple(noise_of(posterior).tolist()) if noise_is_free(posterior) else ()
        return {"log_evidence": evidence, "precisions": precisions, "noise_std": noise_std}

    def _climbed(self, posterior: Posterior) -> Posterior:
        tune_noise = noise_is_free(posterior)
        noise = noise_of(posterior) if tune_noise else torch.ones(0, dtype=torch.float64)
        start = torch.cat([posterior.prior.precisions.detach().log(), noise.log()])
        z = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=self.ascent.rate, maximize=True)
        if self.moments:
            optimizer.load_state_dict(self.moments)
        low, high = _bounds(posterior, start, tune_noise)
        for _ in range(self.ascent.steps):
            optimizer.zero_grad()
            with torch.enable_grad():
                _at(posterior, z, tune_noise).log_evidence().backward()
            optimizer.step()
            with torch.no_grad():
                z.copy_(torch.minimum(torch.maximum(z, low), high))
        self.moments = optimizer.state_dict()
        return _at(posterior, z.detach(), tune_noise)

    def restore_best(self) -> None:
        """The weights, prior and noise of the highest evidence."""
        if self.best is not None:
            self.loss.load_state_dict(self.best)
            self.loss.set_prior(self.loss.prior.with_precisions(self.best_precisions))

    def state(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_evidence": self.best_evidence,
            "best_precisions": self.best_precisions,
            "moments": self.moments,
            "precisions": self.loss.prior.precisions.detach(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_evidence = state["best"], state["best_evidence"]
        self.best_precisions, self.moments = state["best_precisions"], state["moments"]
        self.loss.set_prior(self.loss.prior.with_precisions(state["precisions"]))


def _at(posterior: Posterior, z: Float[Tensor, " d"], tune_noise: bool) -> Posterior:
    n = len(posterior.prior.precisions)
    scales = posterior.likelihood_scale.detach() / (2 * z[n:]).exp() if tune_noise else None  # c = κ/σ²
    return at(posterior, z[:n].exp(), scales)


def _bounds(posterior: Posterior, start: Tensor, tune_noise: bool) -> tuple[Tensor, Tensor]:
    """Those of lw.tune, and no further than a few nats from where an update starts."""
    low, high = log_bounds(posterior)
    if tune_noise:
        least, most = posterior.noise_bounds()
        low, high = torch.cat([low, least.log()]), torch.cat([high, most.log()])
    return torch.maximum(low, start - _LONGEST), torch.minimum(high, start + _LONGEST)
