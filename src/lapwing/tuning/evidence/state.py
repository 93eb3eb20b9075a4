"""The state of tuning apart from the curvature: small enough to be stored in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from lapwing._types import Bool, Float, State, Tensor
from lapwing.curvature import NO_CHECKPOINT, PassCheckpoint
from lapwing.linear_model import Expansion
from lapwing.posterior import Posterior
from lapwing.tuning.evidence.anderson import Anderson
from lapwing.tuning.step import noise_is_free, noise_of, with_noise


@dataclass(frozen=True, eq=False)
class TuningState:
    """The parts of a posterior that tuning changes."""

    precisions: Float[Tensor, " g"]
    noise_std: Float[Tensor, " s"] | None
    expansion: Expansion | None
    history: tuple[Any, ...]

    @classmethod
    def of(cls, posterior: Posterior) -> TuningState:
        noise_std = noise_of(posterior) if noise_is_free(posterior) else None
        return cls(posterior.prior.precisions.detach(), noise_std, posterior.expansion, posterior.history)

    def on(self, posterior: Posterior) -> Posterior:
        """A posterior of the same data with this state."""
        moved = posterior.with_prior(posterior.prior.with_precisions(self.precisions))
        moved = moved if self.noise_std is None else with_noise(moved, self.noise_std)
        return replace(moved, expansion=self.expansion, history=self.history)


@dataclass(eq=False)
class AlternationState:
    """The state between two alternations of θ_* and the hyperparameters."""

    acceleration: Anderson
    current: Posterior
    plain: Posterior  # the last iterate without acceleration
    pruned: Bool[Tensor, " g"]  # groups whose precision was set to its upper bound
    reached: float = -inf  # evidence of the last round
    number: int = 0  # of the round

    @classmethod
    def initial(cls, posterior: Posterior, memory: int) -> AlternationState:
        none = torch.zeros_like(posterior.prior.precisions, dtype=torch.bool)
        return cls(Anderson(memory), posterior, posterior, none)

    def state(self) -> State:
        here = {"current": TuningState.of(self.current), "plain": TuningState.of(self.plain)}
        return {
            **here,
            "let_go": self.pruned,
            "past": self.acceleration.past,
            "reached": self.reached,
            "number": self.number,
        }

    def restore(self, state: State) -> None:
        self.current, self.plain = state["current"].on(self.current), state["plain"].on(self.plain)
        self.acceleration.past, self.pruned = list(state["past"]), state["let_go"]
        self.reached, self.number = state["reached"], state["number"]


@dataclass(frozen=True, eq=False)
class Stage:
    """The alternations on one curvature, when the curvature is re-estimated several times; stores their checkpoints."""

    checkpoint: PassCheckpoint = NO_CHECKPOINT
    number: int = 0
    before: Posterior | None = None  # the posterior at whose mode the curvature of this stage was estimated
    found: State | None = None  # state of this stage from a checkpoint

    def offer(self, state: Callable[[], State]) -> None:
        before = None if self.before is None else TuningState.of(self.before)
        self.checkpoint.offer(lambda: {"stage": self.number, "before": before, **state()})
