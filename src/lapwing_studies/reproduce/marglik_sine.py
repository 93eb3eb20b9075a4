"""MacKay's loop on a sine: precision and noise of a small network by the evidence, a training with a worked result."""

from __future__ import annotations

from dataclasses import dataclass
from math import sin
from typing import Any

import numpy as np
import torch
from torch import nn

import lapwing as lw
from lapwing_studies.reproduce.study import Record


@dataclass(frozen=True)
class SineJob:
    """41 points of a sine, tanh units, α and β by the evidence: MacKay's loop (1992), with the library's training."""

    epochs: int
    hidden: int = 6
    name: str = "sine 1-6-1"

    @property
    def made_with(self) -> str:
        return f"{self.hidden} {self.epochs} v1"

    def run(self) -> Record:
        found = [self._run(seed) for seed in range(2)]
        return max(found, key=lambda run: run["log_evidence"])

    def _run(self, seed: int) -> Record:
        torch.manual_seed(seed)
        x = torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None]
        truth = torch.tensor([[sin(2 * torch.pi * float(v))] for v in x], dtype=torch.float64)
        y = truth + 0.1 * torch.from_numpy(np.random.default_rng(0).normal(size=41))[:, None]
        model = nn.Sequential(nn.Linear(1, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1)).double()
        run = lw.train.marglik(
            model,
            [(x, y)],
            "regression",
            epochs=self.epochs,
            structure="full",
            fisher="exact",
            groups="one",
            precision=0.01,
            start=self.epochs // 4,
            every_epochs=max(5, self.epochs // 40),
            steps=50,
            lr=0.03,
            lr_min=1e-4,
            progress=False,
        )
        posterior = run.posterior
        likelihood: Any = posterior.likelihood
        noise, alpha = float(likelihood.resolved()), float(posterior.prior.precisions)
        with torch.no_grad():
            rmse = float((model(x) - truth).square().mean().sqrt())
        return Record(
            hidden=self.hidden,
            gamma=float(posterior.effective_dimension().sum()),
            alpha=alpha,
            beta=noise**-2,
            noise_std=noise,
            log_evidence=float(posterior.log_evidence()),
            rmse=rmse,
        )
