"""Maximum a posteriori: the negative log likelihood with the log density of the prior."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, Scalar, Tensor
from lapwing.data import ModelInput
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.priors import GaussianPrior
from lapwing.train.batch_loss import BatchLoss
from lapwing.train.divergence import Divergence


class PenalisedLikelihood(BatchLoss):
    """−(1/S) Σ log p(y | x, w) + (β/2N) Σ_l δ_l (w_l − m_l)² of a batch of S data out of N.

    The gradient is that of weight decay βδ/N around the prior's mean. Prior and noise may be set between two steps.
    """

    def __init__(self, model: nn.Module, likelihood: str | Likelihood, n_data: int, **options: Any) -> None:
        super().__init__(model, likelihood, n_data, **options)
        self._write_prior()

    def _write_prior(self) -> None:
        self.divergence = Divergence(self.prior, self.number)

    def set_prior(self, prior: GaussianPrior) -> None:
        """From the next step on."""
        self.prior = prior
        self._write_prior()

    @torch.no_grad()
    def set_noise(self, noise_std: Float[Tensor, " g"]) -> None:
        """From the next step on; held there if it is not among what is trained."""
        assert self.log_noise is not None
        self.log_noise.copy_(noise_std.log().to(self.log_noise))
        self.noise_started.fill_(True)

    def hold_noise(self) -> None:
        """Leave the noise to whoever sets it: no gradient moves it."""
        if self.log_noise is not None:
            self.log_noise.requires_grad_(False)

    def logarithms(self) -> list[nn.Parameter]:
        return [p for p in super().logarithms() if p.requires_grad]

    def terms(self, x: ModelInput, y: Any, *, create_graph: bool) -> tuple[Tensor, Tensor]:
        log_lik = self.observed(x, y).log_lik()
        return log_lik, torch.zeros_like(log_lik)

    def kl(self) -> Scalar:
        return 0.5 * self.divergence.distance(self.means())

    def settled(self) -> Likelihood:
        """The likelihood at the noise there is, without a graph; what was to be estimated still is."""
        family = self.family
        if not isinstance(family, Gaussian):
            return family
        return replace(family, noise_std=family.resolved().detach().cpu())
