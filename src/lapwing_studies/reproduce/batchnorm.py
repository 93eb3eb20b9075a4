"""A network with BatchNorm on one-dimensional data with gaps: error bars with the classic evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.reproduce.choices import tuned, typical_precision
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.means import mean_of
from lapwing_studies.reproduce.parts import Parts, Scaling, Split, shuffled
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.training import Recipe

PLACES = ((-1.0, 0.0), (1.7, 2.5), (4.0, 5.0))
NOISE_STD = 0.25
WIDTH = 50
N_WEIGHTS = WIDTH + WIDTH * WIDTH + WIDTH
RECIPE = Recipe(n_epochs=400, learning_rate=1e-2, patience=20)
N_PER_PLACE = 100
N_TEST = 600
GRID = (-1.5, 5.5)
TUNINGS = (
    ("trained weights", "one"),
    ("linear mode", "one"),
    ("linear mode", "normalised"),
)


def run(study: Study) -> Record:
    return study.record("batchnorm-1d", [BatchNormJob(seed, study) for seed in study.seeds])


def curve(x: Tensor) -> Tensor:
    return x - 0.1 * x.square() + torch.cos(math.pi * x / 2)


def network() -> nn.Module:
    """1-50-50-1 without biases, BatchNorm and ReLU after each hidden layer: 2,600 weights."""
    layers: list[nn.Module] = []
    for fan_in in (1, WIDTH):
        layers += [nn.Linear(fan_in, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1, bias=False))


@dataclass(frozen=True)
class Curve:
    """The data in the network's units: both axes standardised with the training points."""

    parts: Parts
    scale_x: Scaling
    scale_y: Scaling
    between: Tensor  # which test points lie in a gap


def data(seed: int, *, n: int = N_PER_PLACE) -> Curve:
    """n points in each of three intervals, 80% for training; test points everywhere, including the gaps."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([low + (high - low) * torch.rand(n, 1, generator=generator) for low, high in PLACES])
    x = x[shuffled(len(x), seed=seed)]
    y = curve(x) + NOISE_STD * torch.randn(x.shape, generator=generator)
    k = int(0.8 * len(x))
    tested = torch.linspace(PLACES[0][0], PLACES[-1][1], N_TEST)[:, None]
    observed = curve(tested) + NOISE_STD * torch.randn(tested.shape, generator=generator)
    scale_x, scale_y = Scaling.of(x[:k]), Scaling.of(y[:k])
    train, validation, test = (
        Split(scale_x(a), scale_y(b)) for a, b in ((x[:k], y[:k]), (x[k:], y[k:]), (tested, observed))
    )
    inside = torch.stack([(tested >= low) & (tested <= high) for low, high in PLACES]).any(0)
    return Curve(Parts(train, validation, test, test.x[:0], "none"), scale_x, scale_y, ~inside[:, 0])


@dataclass(frozen=True)
class BatchNormJob:
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"batchnorm-1d-{self.seed}"

    @property
    def made_with(self) -> str:
        return f"{self.recipe} | {N_PER_PLACE} points per place | seed {self.seed}"

    @property
    def recipe(self) -> Recipe:
        # The whole study takes seconds; only tests shorten it.
        return RECIPE.at_most(5) if self.study.effort.name == "toy" else RECIPE

    @cached_property
    def curve(self) -> Curve:
        return data(self.seed)

    def trained(self) -> nn.Module:
        return self.study.network(self, network, self.curve.parts, self.recipe, nn.functional.mse_loss)

    def run(self) -> Record:
        model, split = self.trained(), self.curve.parts.train
        posterior = lw.fit(model, (split.x, split.y), "regression", structure="full")
        grid = torch.linspace(*GRID, 281)[:, None]
        return Record(
            seed=self.seed,
            weights=N_WEIGHTS,
            parameters=sum(p.numel() for p in model.parameters()),
            n_train=len(split),
            train_x=_list(split.x * self.curve.scale_x.std + self.curve.scale_x.mean),
            train_y=_list(split.y * self.curve.scale_y.std + self.curve.scale_y.mean),
            grid=_list(grid),
            truth=_list(curve(grid)),
            rows=[self._row(model, posterior, grid, *tuning) for tuning in TUNINGS],
        )

    def _row(self, model: nn.Module, posterior: lw.Posterior, grid: Tensor, evidence: str, groups: str) -> Record:
        """`precision`: geometric mean over weights. `gap_std`: mean epistemic standard deviation between the data, in
        units of the target's."""
        split, test, between = self.curve.parts.train, self.curve.parts.test, self.curve.between
        chosen = tuned(posterior, model, (split.x, split.y), evidence, groups)
        p: Any = chosen.predict(test.x)
        log_prob = p.log_prob(test.y).detach().flatten()
        noise = float(p.aleatoric.flatten()[0].sqrt())
        return Record(
            evidence=evidence,
            groups=groups,
            precision=typical_precision(chosen),
            precisions=chosen.prior.precisions.detach().tolist(),
            noise_std=noise,
            nll=metrics.nll(log_prob),
            nll_data=metrics.nll(log_prob[~between]),
            nll_gap=metrics.nll(log_prob[between]),
            gap_std=float(p.epistemic.detach().flatten()[between].sqrt().mean()),
            band=self._band(chosen, grid),
        )

    def _band(self, posterior: lw.Posterior, grid: Tensor) -> Record:
        p: Any = posterior.predict(self.curve.scale_x(grid))
        scale = self.curve.scale_y
        return Record(mean=_list(p.mean * scale.std + scale.mean), std=_list(p.std[:, None] * scale.std))


def _list(values: Tensor) -> list[float]:
    return [round(v, 5) for v in values.detach().double().flatten().tolist()]


def claims(record: Record) -> list[Claim]:
    """At the trained weights, and at the linear mode with one precision and with several."""
    ways = [[run["rows"][k] for run in record["runs"]] for k in range(len(TUNINGS))]
    precision = [math.exp(fmean(math.log(row["precision"]) for row in rows)) for rows in ways[:2]]
    nll = [mean_of(rows, "nll") for rows in ways]
    return [
        Claim("with normalisation the evidence at the trained weights gives a far smaller precision", "ratio above 10",
              f"{precision[0]:.3g} against {precision[1]:.3g}", precision[1] > 10 * precision[0]),
        Claim("and a worse test NLL", "worse", f"{nll[0]:.3f} against {nll[1]:.3f}", nll[0] > nll[1]),
        Claim("one precision for each normalised group is as good as one for all", "not worse",
              f"{nll[2]:.3f} against {nll[1]:.3f}", nll[2] <= nll[1] + 0.005),
    ]  # fmt: skip
