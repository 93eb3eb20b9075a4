"""Ordinary training: mini-batch Adam with weight decay, to the end of a schedule or with early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lapwing_studies.reproduce.parts import Parts, Split

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """Adam on the mean loss plus ½ weight_decay ‖θ‖², which is a prior of precision weight_decay · N."""

    n_epochs: int
    learning_rate: float
    weight_decay: float = 1e-4
    batch_size: int = 64
    patience: int | None = None

    def at_most(self, n_epochs: int) -> Recipe:
        return replace(self, n_epochs=min(self.n_epochs, n_epochs))

    @property
    def stops(self) -> str:
        return "to the end" if self.patience is None else "early-stopped"


def train(model: nn.Module, parts: Parts, loss: Loss, recipe: Recipe, *, seed: int) -> nn.Module:
    """The trained network in evaluation mode: the last weights, or those with the best held-out loss if `patience` is
    set."""
    train_epoch = _to_the_end if recipe.patience is None else _until_it_worsens
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        train_epoch(model, parts, loss, recipe, generator)
    for p in model.parameters():
        p.grad = None
    return model.eval()


def _to_the_end(model: nn.Module, parts: Parts, loss: Loss, recipe: Recipe, generator: torch.Generator) -> None:
    optimiser = _adam(model, recipe)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.n_epochs)
    for _ in range(recipe.n_epochs):
        _epoch(model, parts.train, loss, optimiser, recipe, generator)
        schedule.step()


def _until_it_worsens(model: nn.Module, parts: Parts, loss: Loss, recipe: Recipe, generator: torch.Generator) -> None:
    """Early stopping: a constant learning rate until the held-out loss has not improved for `patience` epochs."""
    optimiser = _adam(model, recipe)
    best, kept, waited = float("inf"), deepcopy(model.state_dict()), 0
    for _ in range(recipe.n_epochs):
        _epoch(model, parts.train, loss, optimiser, recipe, generator)
        held_out = _held_out(model, parts.validation, loss)
        waited = 0 if held_out < best else waited + 1
        if held_out < best:
            best, kept = held_out, deepcopy(model.state_dict())
        if waited == recipe.patience:
            break
    model.load_state_dict(kept)


def _adam(model: nn.Module, recipe: Recipe) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)


def _epoch(
    model: nn.Module, data: Split, loss: Loss, optimiser: torch.optim.Adam, recipe: Recipe, generator: torch.Generator
) -> None:
    model.train()
    for rows in _batches(len(data), recipe.batch_size, generator):
        optimiser.zero_grad()
        loss(model(data.x[rows]), data.y[rows]).backward()
        optimiser.step()


def _batches(n: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled batches of nearly equal size: BatchNorm fails on a last batch of one row."""
    yield from torch.randperm(n, generator=generator).tensor_split(max(1, round(n / size)))


def _held_out(model: nn.Module, data: Split, loss: Loss) -> float:
    model.eval()
    with torch.no_grad():
        return float(loss(model(data.x), data.y))
