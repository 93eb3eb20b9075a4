"""What the variational objectives share: log standard deviations beside the model's own parameters, and the bound."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, Scalar, Tensor
from lapwing.data import Batches, ModelInput, as_batches
from lapwing.errors import InputError
from lapwing.likelihoods import Likelihood
from lapwing.linear_model import Elbo
from lapwing.posterior import Posterior, Trained
from lapwing.runtime import distributed
from lapwing.runtime.arguments import counted, positive_scale
from lapwing.runtime.sandbox import borrowed, plain_tensors, random_state_kept
from lapwing.train.batch_loss import BatchLoss
from lapwing.train.divergence import Divergence
from lapwing.train.result import Result, posterior_of

_START = -3.0  # log σ − log s
_NEAR = 0.1  # of a logarithm


class Objective(BatchLoss):
    """−ELBO of a batch per datum, for q(w) = Π N(μ_l, σ_l²): the means are the model's parameters, trained in place."""

    by: str
    predictive: str
    n_predicted: int
    bound_draws: int = 1  # that the bound takes at least

    def __init__(
        self, model: nn.Module, likelihood: str | Likelihood, n_data: int, *, draws: int, **options: Any
    ) -> None:
        self_draws = counted("draws", draws)
        super().__init__(model, likelihood, n_data, **options)
        self.draws = self_draws
        std = self.prior.P0.diagonal.detach().rsqrt().to(self.number)
        self.register_buffer("prior_std", std, persistent=False)
        self.divergence = Divergence(self.prior, self.number)
        self.log_std = nn.Parameter(std.log() + _START)
        self._variance: Tensor | None = None

    prior_std: Float[Tensor, " p"]

    @contextmanager
    def one_variance(self) -> Iterator[None]:
        """σ² is worked out once inside, for whoever needs it."""
        self._variance = (2 * self.log_std).exp()
        try:
            yield
        finally:
            self._variance = None

    @property
    def variance(self) -> Float[Tensor, " p"]:
        """σ², in its graph."""
        return (2 * self.log_std).exp() if self._variance is None else self._variance

    def terms(self, x: ModelInput, y: Any, *, create_graph: bool) -> tuple[Tensor, Tensor]:
        return self.averaged(x, y, draws=self.draws, create_graph=create_graph)

    @abstractmethod
    def averaged(self, x: ModelInput, y: Any, *, draws: int, create_graph: bool) -> tuple[Tensor, Tensor]:
        """The terms of a batch, over so many random draws."""

    def kl(self) -> Scalar:
        """KL(q ‖ prior), float64."""
        return self.divergence(self.means(), self.log_std, self.variance)

    def logarithms(self) -> list[nn.Parameter]:
        return [self.log_std, *super().logarithms()]

    # --- the bound, and the posterior ---------------------------------------------------------------

    @plain_tensors()
    def elbo(self, data: Any, *, beta: float | None = None) -> Float[Tensor, ""]:
        """E_q[Σ log p(y | w)] − β KL(q ‖ prior) over all data, float64; a bound on log p(D) at β = 1.

        In eval mode, leaving the model as it is. β is the objective's own unless given.
        """
        bound = self.bound(as_batches(data, columns=self.columns))
        beta = self.beta if beta is None else float(positive_scale("beta", beta))
        return torch.tensor(bound.expected_log_lik - beta * bound.kl, dtype=torch.float64)

    def bound(self, batches: Batches) -> Elbo:
        """Both terms of the bound; random draws are the same at every call."""
        state, draws = self.generator.get_state(), max(self.draws, self.bound_draws)
        total = torch.zeros((), dtype=torch.float64)
        try:
            self.generator.manual_seed(0)
            for x, y in batches:
                self.look_at(x)
                with random_state_kept(), borrowed(self.model):
                    log_lik, penalty = self.averaged(x, y, draws=draws, create_graph=False)
                total += log_lik.detach().double().cpu() - penalty.detach().double().cpu()
            with torch.no_grad():
                return Elbo(float(distributed.total(total)), float(self.kl()))
        finally:
            self.generator.set_state(state)

    def posterior(self, data: Any = None) -> Posterior:
        """N(μ, diag σ²) as an ordinary posterior of the network as it is now.

        With the training data it knows its bound on log p(D): one pass.
        """
        batches = None if data is None else as_batches(data, columns=self.columns)
        if batches is not None:
            self.look_at(batches.first_on_any_rank()[0])
        if self.few is None:
            raise InputError(
                "posterior() linearises the network at some inputs, and this objective has seen none yet. Call it on a "
                "batch first, or pass the training data: objective.posterior(data)."
            )
        bound = None if batches is None else self.bound(batches)
        trained = Trained(self.by, self.beta, self.predictive, self.n_predicted, *self.moved(), bound)
        log_std = self.log_std.detach()
        return posterior_of(
            Result(self.model, self.few, self.family, log_std, self.prior, self.n_data, self.columns, trained)
        )

    def moved(self) -> tuple[float, float]:
        """Fractions of the variances at the prior's, and where they started."""
        ratio = self.log_std.detach() - self.prior_std.log()
        return float((ratio.abs() < _NEAR).float().mean()), float(((ratio - _START).abs() < _NEAR).float().mean())
