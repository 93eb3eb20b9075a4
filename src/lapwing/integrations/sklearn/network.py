"""The network of an estimator: made, or taken from what the user gave, and trained with early stopping."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import InputTypeError

Loss = Callable[[Tensor, Tensor], Tensor]  # (f, y) → one number per row


def make_module(module: Any, n_features: int, n_outputs: int, hidden: Sequence[int]) -> nn.Module:
    """An MLP, or the user's: a module (copied), a class or function of (n_features, n_outputs), or a skorch net."""
    if module is None:
        return mlp(n_features, n_outputs, hidden)
    if not isinstance(module, nn.Module | type) and hasattr(module, "get_params_for"):  # skorch
        chosen, options = module.module, module.get_params_for("module")
        return deepcopy(chosen) if isinstance(chosen, nn.Module) else chosen(**options)
    if isinstance(module, nn.Module):
        return deepcopy(module)
    if not callable(module):
        raise InputTypeError(
            f"module: expected an nn.Module, a class or function of (n_features, n_outputs), a skorch net or None, got "
            f"{type(module).__name__}."
        )
    made = module(n_features, n_outputs) if _takes_two(module) else module()
    if not isinstance(made, nn.Module):
        raise InputTypeError(f"module: the function gave {type(made).__name__}; expected an nn.Module.")
    return made


def mlp(n_features: int, n_outputs: int, hidden: Sequence[int]) -> nn.Module:
    sizes = [n_features, *hidden]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], n_outputs))


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(1, 1)
    except (TypeError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class Training:
    """Adam on all rows at once, or on batches where there are many; the epoch best on held-out rows is kept."""

    epochs: int
    patience: int
    rate: float
    batch_size: int
    weight_decay: float
    seed: int

    def __call__(self, model: nn.Module, loss: Loss, train: Sequence[Tensor], held_out: Sequence[Tensor] | None) -> int:
        """Train in place on (x, y, weight); returns how many epochs the kept weights had."""
        generator = torch.Generator().manual_seed(self.seed)
        optimiser = torch.optim.Adam(model.parameters(), self.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, self.epochs))
        best, kept, found, epoch = float("inf"), deepcopy(model.state_dict()), 0, 0
        for epoch in range(1, self.epochs + 1):
            model.train()
            for batch in self._batches(train, generator):
                optimiser.zero_grad()
                self._objective(model, loss, *batch).backward()
                optimiser.step()
            schedule.step()
            if held_out is None:
                continue
            score = _mean_loss(model, loss, *held_out)
            if score < best:
                best, kept, found = score, deepcopy(model.state_dict()), epoch
            elif epoch - found >= self.patience:
                break
        if held_out is not None and found:
            model.load_state_dict(kept)
        model.eval()
        return found if held_out is not None else epoch

    def _batches(self, train: Sequence[Tensor], generator: torch.Generator) -> list[tuple[Tensor, ...]]:
        n = len(train[0])
        if n <= self.batch_size:
            return [tuple(train)]
        order = torch.randperm(n, generator=generator).to(train[0].device).split(self.batch_size)
        return [tuple(t[rows] for t in train) for rows in order]

    def _objective(self, model: nn.Module, loss: Loss, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        fit = (weight * loss(model(x), y)).sum() / weight.sum()
        return fit + 0.5 * self.weight_decay * sum((p.square().sum() for p in model.parameters()), fit.new_zeros(()))


@torch.no_grad()
def _mean_loss(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, weight: Tensor) -> float:
    model.eval()
    return float((weight * loss(model(x), y)).sum() / weight.sum())
