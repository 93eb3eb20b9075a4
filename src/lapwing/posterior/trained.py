"""What training leaves besides a Gaussian over weights: how it was trained, its bound, and the run as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from lapwing.errors import StructureError
from lapwing.linear_model import Elbo

if TYPE_CHECKING:
    from lapwing.posterior.value import Posterior

N_DRAWS = 1000  # of weights or functions that a prediction averages, unless told otherwise


@dataclass(frozen=True)
class Trained:
    """How a posterior was trained: the Gaussian is that of the objective, not of a fit at the weights."""

    by: str  # "variational_laplace" or "mean_field"
    beta: float  # what the divergence was multiplied by
    predictive: str  # how its paper predicts: what `predict` does unless told otherwise
    n_draws: int  # of weights, in such a prediction
    reverted: float  # fraction of the variances at the prior's, log σ within 0.1 of log s
    unmoved: float  # fraction of the variances where they started
    bound: Elbo | None = None  # E_q[Σ log p(y | w)] and KL(q ‖ prior) over the training data, where they were given

    @property
    def elbo(self) -> float:
        """The lower bound on log p(D): not tempered, whatever β was."""
        if self.bound is None:
            raise StructureError(
                "The bound on log p(D) takes a pass over the training data: objective.posterior(data), or "
                "objective.elbo(data)."
            )
        return self.bound.total


@dataclass(frozen=True)
class Epoch:
    """What an epoch of training left: means over its steps, and what was measured at its end."""

    epoch: int
    loss: float  # per datum
    log_lik: float  # per datum
    penalty: float
    kl: float
    lr: float
    seconds: float
    validation: Mapping[str, float] = field(default_factory=dict)  # NLL per term, accuracy of classes
    log_evidence: float | None = None  # of marginal-likelihood training, where this epoch estimated it
    precisions: tuple[float, ...] = ()
    noise_std: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """What training ends with: the model it trained in place, one record an epoch, and a posterior."""

    model: nn.Module
    history: tuple[Epoch, ...]
    made: Callable[[], Posterior]  # the posterior, which may take a pass over the data
    _kept: list[Posterior] = field(default_factory=list)

    @property
    def posterior(self) -> Posterior:
        """An ordinary posterior at the trained weights; made once."""
        if not self._kept:
            self._kept.append(self.made())
        return self._kept[0]

    def __repr__(self) -> str:
        last = self.history[-1]
        text = f"Run of {type(self.model).__name__}: {len(self.history)} epochs, loss {last.loss:.4g} per datum"
        measured = ", ".join(f"{name} {value:.4g}" for name, value in last.validation.items())
        return f"{text}, validation {measured}" if measured else text
