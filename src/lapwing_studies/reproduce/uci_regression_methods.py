"""The methods on one split of a regression: the trained network, linearised, sampled and mean-field posteriors."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce.architectures import mlp, seeded
from lapwing_studies.reproduce.parts import Split
from lapwing_studies.reproduce.study import Record

MAP = "MAP"
WIDTH, RATE, SHARE = 50, 1e-2, 0.15  # hidden units, learning rate, share of validation rows
RATIOS = tuple(10 ** (-3 + k / 2) for k in range(13))  # λ = δ σ², of the validation grid


@dataclass(frozen=True, eq=False)
class Task:
    """Standardised rows, and the spread of the target."""

    train: Split
    test: Split
    spread: float
    seed: int

    @cached_property
    def kept(self) -> Split:
        return self.train.rows(slice(self.n_held_out, None))

    @cached_property
    def held_out(self) -> Split:
        return self.train.rows(slice(self.n_held_out))

    @property
    def n_held_out(self) -> int:
        return round(SHARE * len(self.train))

    def network(self) -> nn.Module:
        return seeded(lambda: mlp((self.train.x.shape[1], WIDTH, 1), nn.ReLU), seed=self.seed)

    def trained(self, steps: int) -> list[tuple[nn.Module, float]]:
        """Two networks and their noise, trained side by side: on all training rows, and without the validation rows."""
        x, y, weights = self.train.x, self.train.y, torch.ones(2, len(self.train), 1)
        weights[1, : self.n_held_out] = 0
        stacked = [p.detach().repeat(2, *[1] * p.ndim).requires_grad_() for p in self.network().parameters()]
        log_noise = torch.full((2, 1, 1), -0.5, requires_grad=True)
        optimiser = torch.optim.Adam([*stacked, log_noise], lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            optimiser.zero_grad()
            hidden = torch.baddbmm(stacked[1][:, None], x.expand(2, *x.shape), stacked[0].mT).relu()
            z = (y - torch.baddbmm(stacked[3][:, None], hidden, stacked[2].mT)) / log_noise.exp()
            penalty = sum(p.square().sum() for p in stacked)
            ((weights * (0.5 * z.square() + log_noise)).sum() + 0.5 * penalty).backward()
            optimiser.step()
            schedule.step()
        return [(self._network([p.detach()[g] for p in stacked]), float(log_noise.detach()[g].exp())) for g in (0, 1)]

    def _network(self, tensors: list[Tensor]) -> nn.Module:
        model = self.network()
        model.load_state_dict(dict(zip(model.state_dict(), tensors, strict=True)))
        return model.eval()

    def held_out_noise(self, partial: nn.Module) -> float:
        with torch.no_grad():
            return float((self.held_out.y - partial(self.held_out.x)).square().mean().sqrt())

    def plain(self, model: nn.Module, noise: float, by: str) -> Record:
        with torch.no_grad():
            mean = model(self.test.x)
        log_prob = torch.distributions.Normal(mean.double(), noise).log_prob(self.test.y.double())
        return self._score(MAP, by, mean, log_prob)

    def by_evidence(self, model: nn.Module, structure: str, mode: str) -> lw.Posterior:
        rows = (self.train.x, self.train.y)
        fitted = lw.fit(model, rows, lw.Gaussian(), structure=structure, prior=1.0, progress=False)
        return lw.tune(fitted, rows, groups="one", mode=mode, progress=False)

    def by_validation(self, model: nn.Module, partial: nn.Module, structure: str) -> lw.Posterior:
        """δ and σ from the network that has not seen the validation rows, for the posterior of the other.

        The predictive variance is σ² (1 + v(λ)) with λ = δ σ², so that for every λ the best σ² is the mean of
        r² / (1 + v).
        """
        unit = _fitted(partial, self.kept, structure, 1.0, RATIOS[0])
        best = min((self._at_ratio(unit, ratio) for ratio in RATIOS), key=lambda found: found[0])
        _, ratio, var = best
        return _fitted(model, self.train, structure, math.sqrt(var), ratio / var)

    def _at_ratio(self, unit: lw.Posterior, ratio: float) -> tuple[float, float, float]:
        """Held-out NLL up to a constant, λ and σ²."""
        found = unit.with_prior(ratio).outputs(self.held_out.x)
        spread = 1 + found.var.detach().double()
        var = float(((self.held_out.y - found.mean.detach()).double().square() / spread).mean())
        return 0.5 * math.log(var) + 0.5 * float(spread.log().mean()), ratio, var

    def mean_field(self, model: nn.Module, steps: int) -> lw.Posterior:
        """Full batches, local reparametrisation, the noise learnt by the bound.

        Its means start from the trained network: from random ones, as many steps end at a bound lower by hundreds of
        nats.
        """
        found = lw.train.mean_field(
            deepcopy(model),
            (self.train.x, self.train.y),
            lw.Gaussian(),
            epochs=steps,
            lr=RATE,
            multiplier=2,
            prior=1.0,
            estimator="local",
            batch_size=len(self.train),
            schedule=lambda optimiser: torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps),
            generator=torch.Generator().manual_seed(self.seed),
            progress=False,
        )
        return found.posterior

    def scored(self, method: str, by: str, posterior: lw.Posterior, **options: Any) -> Record:
        predicted = posterior.predict(self.test.x, generator=torch.Generator().manual_seed(0), **options)
        return self._score(method, by, predicted.mean.detach(), predicted.log_prob(self.test.y).detach())

    def _score(self, method: str, by: str, mean: Tensor, log_prob: Tensor) -> Record:
        rmse = float((mean - self.test.y).double().square().mean().sqrt()) * self.spread
        return Record(method=method, by=by, rmse=rmse, ll=float(log_prob.double().mean()) - math.log(self.spread))


def _fitted(model: nn.Module, rows: Split, structure: str, noise: float, precision: float) -> lw.Posterior:
    likelihood = lw.Gaussian(noise_std=noise)
    return lw.fit(model, (rows.x, rows.y), likelihood, structure=structure, prior=precision, progress=False)
