"""How a loop goes: optimizer, schedule, what is watched, what is written down."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lapwing.errors import InputError, InputTypeError, warn
from lapwing.runtime.arguments import choose, counted, positive_scale
from lapwing.train.batch_loss import BatchLoss

_FAR_ENOUGH = 6.0  # nats that log σ should be able to travel: twice the way from its start to the prior
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


@dataclass(frozen=True, eq=False)
class Settings:
    """What the user said about the loop."""

    epochs: int
    optimizer: Any = None
    schedule: Any = None
    schedule_every: str = "epoch"
    lr: float = 1e-3
    multiplier: float = 10.0
    batch_size: int = 128
    clip: float | None = None
    validation: Any = None
    patience: int | None = None
    callback: Callable[..., Any] | None = None
    checkpoint: Any = None
    every: float = 60
    progress: bool | None = None

    def __post_init__(self) -> None:
        counted("epochs", self.epochs, "epoch")
        counted("batch_size", self.batch_size, "row")
        positive_scale("lr", self.lr), positive_scale("multiplier", self.multiplier)
        if self.clip is not None:
            positive_scale("clip", self.clip)
        if self.patience is not None:
            counted("patience", self.patience, "epoch")
            if self.validation is None:
                raise InputError("patience: stopping early needs held-out data, validation=(X, Y) or a loader.")
        choose("schedule_every", self.schedule_every, {"epoch": False, "step": True})
        for name in ("optimizer", "schedule", "callback"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InputTypeError(f"{name}: {_EXPECTED[name]}, got {type(value).__name__}.")

    def with_schedule(self, schedule: Callable[[Optimizer], LRScheduler], every: str) -> Settings:
        return replace(self, schedule=schedule, schedule_every=every)

    def made(self, loss: BatchLoss) -> tuple[Optimizer, LRScheduler | ReduceLROnPlateau | None]:
        """The optimizer of the loss's parameters, and the schedule of the optimizer."""
        return self._of(loss.param_groups(self.lr, self.multiplier))

    def _of(self, groups: list[dict[str, Any]]) -> tuple[Optimizer, LRScheduler | ReduceLROnPlateau | None]:
        optimizer = torch.optim.Adam(groups, lr=self.lr) if self.optimizer is None else self.optimizer(groups)
        if not isinstance(optimizer, Optimizer):
            raise InputTypeError(f"optimizer: {_EXPECTED['optimizer']}; it gave {type(optimizer).__name__}.")
        _refuse_weight_decay(optimizer)
        schedule = None if self.schedule is None else self.schedule(optimizer)
        if schedule is not None and not isinstance(schedule, LRScheduler | ReduceLROnPlateau):
            raise InputTypeError(f"schedule: {_EXPECTED['schedule']}; it gave {type(schedule).__name__}.")
        return optimizer, schedule

    def warn_of_short_way(self, n_steps: int) -> None:
        """Adam moves a logarithm by its learning rate in a step at most: that sums to how far a variance can go."""
        if not n_steps:
            return
        rates = (self.lr, self.lr * self.multiplier)
        optimizer, schedule = self._of(
            [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr, "weight_decay": 0.0} for lr in rates]
        )
        if not isinstance(optimizer, _ADAMS):
            return
        way, start = 0.0, float(optimizer.param_groups[-1]["lr"])
        every = 1 if self.schedule_every == "step" else n_steps
        for _ in range(self.epochs * n_steps // every):
            way += every * float(optimizer.param_groups[-1]["lr"])
            if isinstance(schedule, LRScheduler):
                optimizer.step()
                schedule.step()
        if way < _FAR_ENOUGH:
            warn(
                f"{self.epochs} epochs of {n_steps} steps with a learning rate of {start:.3g} for the logarithms of "
                f"standard deviations let each of them move by {way:.3g} at most, and they start 3 below the prior's: "
                f"stopping then would cut the variances short. Let steps × lr × multiplier reach {_FAR_ENOUGH:.0f}: "
                f"multiplier={self.multiplier * _FAR_ENOUGH / max(way, 1e-12):.3g}, or more epochs."
            )


_EXPECTED = {
    "optimizer": "expected a function of parameter groups that gives a torch.optim.Optimizer, such as torch.optim.Adam",
    "schedule": (
        "expected a function of the optimizer that gives a scheduler of torch.optim.lr_scheduler, such as "
        "lambda optimizer: MultiStepLR(optimizer, [15, 23])"
    ),
    "callback": "expected a function of the record of an epoch",
}


def _refuse_weight_decay(optimizer: Optimizer) -> None:
    usual = inspect.signature(type(optimizer).__init__).parameters.get("weight_decay")
    default = 0.0 if usual is None or usual.default is inspect.Parameter.empty else usual.default
    asked = optimizer.defaults.get("weight_decay", default) != default
    if asked or any(group.get("weight_decay") for group in optimizer.param_groups):
        raise InputError(
            "optimizer: weight_decay beside the prior counts the prior twice. The prior's weight decay is in the loss "
            "already, as prior=...; leave weight_decay out."
        )
