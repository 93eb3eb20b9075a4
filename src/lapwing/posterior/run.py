"""The result of a training run: the model, one record per epoch, and a posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from lapwing.posterior.value import Posterior


@dataclass(frozen=True)
class Epoch:
    """Record of an epoch: means over its steps, and measurements at its end."""

    epoch: int
    loss: float  # per datum
    log_lik: float  # per datum
    penalty: float
    kl: float
    lr: float
    seconds: float
    validation: Mapping[str, float] = field(default_factory=dict)  # NLL per likelihood term, accuracy
    log_evidence: float | None = None  # of marginal-likelihood training, if estimated in this epoch
    precisions: tuple[float, ...] = ()
    noise_std: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """The result of training: the model (trained in place), one record per epoch, and a posterior."""

    model: nn.Module
    history: tuple[Epoch, ...]
    made: Callable[[], Posterior]  # makes the posterior, which may take a pass over the data
    _kept: list[Posterior] = field(default_factory=list)

    @property
    def posterior(self) -> Posterior:
        """A posterior at the trained weights; computed once."""
        if not self._kept:
            self._kept.append(self.made())
        return self._kept[0]

    def __repr__(self) -> str:
        last = self.history[-1]
        text = f"Run of {type(self.model).__name__}: {len(self.history)} epochs, loss {last.loss:.4g} per datum"
        measured = ", ".join(f"{name} {value:.4g}" for name, value in last.validation.items())
        return f"{text}, validation {measured}" if measured else text
