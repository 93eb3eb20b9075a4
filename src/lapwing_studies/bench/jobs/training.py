"""Train with mini-batch Adam and a cosine schedule; stored weights are not trained again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import torch
from torch import nn

from lapwing_studies.bench.jobs.kinds import Kind
from lapwing_studies.bench.jobs.rows import Rows, called
from lapwing_studies.reproduce.training import Recipe


@dataclass(frozen=True, eq=False)
class Trained:
    """A network in evaluation mode, and the CPU seconds of its training."""

    model: nn.Module
    seconds: float


def train(build: Callable[[], nn.Module], rows: Rows, kind: Kind, recipe: Recipe, *, seed: int = 0) -> Trained:
    """Weights, order of rows and dropout depend on the seed only; torch's global random state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        start = process_time()
        _steps(model, rows, kind, recipe)
        seconds = process_time() - start
    for p in model.parameters():
        p.grad = None
    return Trained(model.eval(), seconds)


def _steps(model: nn.Module, rows: Rows, kind: Kind, recipe: Recipe) -> None:
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(trainable, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, recipe.n_epochs))
    for _ in range(recipe.n_epochs):
        # Parts of nearly equal size: BatchNorm fails on a last batch of one row.
        for chosen in torch.randperm(len(rows)).tensor_split(max(1, round(len(rows) / recipe.batch_size))):
            optimiser.zero_grad()
            batch = rows[chosen]
            kind.loss(called(model, batch.x), batch.y).backward()
            optimiser.step()
        schedule.step()


@dataclass(frozen=True)
class Shelf:
    """A folder of trained networks; None stores nothing."""

    folder: Path | None

    def trained(self, name: str, build: Callable[[], nn.Module], train_it: Callable[[], Trained]) -> Trained:
        """Load from the folder, or train; `seconds` are those of the training in both cases."""
        if self.folder is None:
            return train_it()
        path = self.folder / f"{name}.pt"
        if path.exists():
            kept = torch.load(path, weights_only=True)
            model = build()
            model.load_state_dict(kept["weights"])
            return Trained(model.eval(), kept["seconds"])
        trained = train_it()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": trained.model.state_dict(), "seconds": trained.seconds}, path)
        return trained
