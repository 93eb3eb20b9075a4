"""How far a tuning has come, apart from the curvature it works on: small, and can be written down."""

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
class Position:
    """What tuning changes of a posterior."""

    precisions: Float[Tensor, " g"]
    noise_std: Float[Tensor, " s"] | None
    expansion: Expansion | None
    history: tuple[Any, ...]

    @classmethod
    def of(cls, posterior: Posterior) -> Position:
        noise_std = noise_of(posterior) if noise_is_free(posterior) else None
        return cls(posterior.prior.precisions.detach(), noise_std, posterior.expansion, posterior.history)

    def on(self, posterior: Posterior) -> Posterior:
        """A posterior of the same data, moved here."""
        moved = posterior.with_prior(posterior.prior.with_precisions(self.precisions))
        moved = moved if self.noise_std is None else with_noise(moved, self.noise_std)
        return replace(moved, expansion=self.expansion, history=self.history)


@dataclass(eq=False)
class Turns:
    """Where θ_* and the hyperparameters stand between two turns, and the best that was reached."""

    mixing: Anderson
    current: Posterior
    plain: Posterior
    let_go: Bool[Tensor, " g"]  # groups that have been put at their upper bound
    reached: float = -inf
    number: int = 0

    @classmethod
    def begun(cls, posterior: Posterior, memory: int) -> Turns:
        none = torch.zeros_like(posterior.prior.precisions, dtype=torch.bool)
        return cls(Anderson(memory), posterior, posterior, none)

    def state(self) -> State:
        here = {"current": Position.of(self.current), "plain": Position.of(self.plain)}
        return {**here, "let_go": self.let_go, "past": self.mixing.past, "reached": self.reached, "number": self.number}

    def restore(self, state: State) -> None:
        self.current, self.plain = state["current"].on(self.current), state["plain"].on(self.plain)
        self.mixing.past, self.let_go = list(state["past"]), state["let_go"]
        self.reached, self.number = state["reached"], state["number"]


@dataclass(frozen=True, eq=False)
class Stage:
    """One round of turns among those that have a curvature each: the checkpoint's part in it."""

    checkpoint: PassCheckpoint = NO_CHECKPOINT
    number: int = 0
    before: Posterior | None = None  # whose mode this stage's curvature was taken at
    found: State | None = None  # what an earlier run has left of this stage

    def offer(self, state: Callable[[], State]) -> None:
        before = None if self.before is None else Position.of(self.before)
        self.checkpoint.offer(lambda: {"stage": self.number, "before": before, **state()})
