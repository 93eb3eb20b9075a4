"""A noisy curve measured on two sides of a gap: are error bars larger in the gap?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.bench.networks import mlp, n_parameters, train_map
from lapwing_studies.bench.records import Band, RegressionRecord, RegressionRow
from lapwing_studies.bench.sizes import Size

NOISE_STD = 0.2
LEFT, RIGHT = (-4.0, -1.1), (1.1, 4.0)
GAP = (LEFT[1], RIGHT[0])
TRAINED_WITH = 0.5
SWEEP = (-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Gaussians:
    """One normal distribution per point, enough for every regression score."""

    mean: Tensor
    std: Tensor

    def log_prob(self, y: Tensor) -> Tensor:
        return torch.distributions.Normal(self.mean, self.std).log_prob(y)


@dataclass(frozen=True)
class Curve:
    """y = sin(1.4 x + phase) + slope x + noise."""

    phase: float
    slope: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sin(1.4 * x + self.phase) + self.slope * x

    def measure(self, n: int, places: tuple[tuple[float, float], ...], g: torch.Generator) -> tuple[Tensor, Tensor]:
        """n noisy measurements, equally many in each interval."""
        parts = [low + (high - low) * torch.rand(n // len(places), 1, generator=g) for low, high in places]
        x = torch.cat(parts).sort(0).values
        return x, self(x) + NOISE_STD * torch.randn(x.shape, generator=g)


@dataclass(frozen=True)
class Fitted:
    curve: Curve
    train: tuple[Tensor, Tensor]
    model: nn.Module
    posterior: lw.Posterior


def run(size: Size, *, seed: int, stage: Callable[[str], None]) -> RegressionRecord:
    """Fit several random curves and average their scores; the figure shows the first.

    On a single curve, coverage in the gap depends on whether the network extrapolates correctly by chance.
    """
    generator = torch.Generator().manual_seed(seed)
    stage("regression: train and fit")
    fitted = [fit_curve(_random_curve(generator), size, seed + k, generator) for k in range(size.n_curves)]
    stage("regression: score")
    rows = _mean_rows([_rows(f, size, generator) for f in fitted])
    stage("regression: predict")
    return _record(fitted[0], rows, size, generator)


def _random_curve(generator: torch.Generator) -> Curve:
    phase, slope = torch.rand(2, generator=generator).tolist()
    return Curve(2 * math.pi * phase, 0.6 * slope - 0.3)


def fit_curve(curve: Curve, size: Size, seed: int, generator: torch.Generator) -> Fitted:
    """Train, fit the full posterior, tune prior and noise by the evidence."""
    x, y = curve.measure(size.n_curve, (LEFT, RIGHT), generator)
    model = train_map(mlp([1, 24, 24, 1], seed=seed), x, y, _sum_nll, precision=TRAINED_WITH, n_steps=size.n_steps)
    posterior = lw.fit(model, (x, y), "regression", structure="full", prior=TRAINED_WITH)
    return Fitted(curve, (x, y), model, lw.tune(posterior, (x, y), by="evidence"))


def _record(fitted: Fitted, rows: list[RegressionRow], size: Size, generator: torch.Generator) -> RegressionRecord:
    posterior, model = fitted.posterior, fitted.model
    grid = torch.linspace(-6.0, 6.0, size.n_grid)[:, None]
    tuned = float(posterior.prior.precisions[0])
    prediction: Any = posterior.predict(grid)
    return RegressionRecord(
        parameters=n_parameters(model),
        n_curves=size.n_curves,
        gap=list(GAP),
        noise_std=float(prediction.aleatoric.flatten()[0].sqrt()),
        true_noise_std=NOISE_STD,
        train_x=_list(fitted.train[0]),
        train_y=_list(fitted.train[1]),
        x=_list(grid),
        truth=_list(fitted.curve(grid)),
        mean=_list(prediction.mean),
        draws=[_list(draw) for draw in posterior.functions(6, generator)(grid)],
        bands=[_band(posterior.with_prior(lw.prior(model, precision=tuned * 10**k)), grid) for k in SWEEP],
        tuned=SWEEP.index(0.0),
        rows=rows,
    )


def _sum_nll(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().sum() / (2 * NOISE_STD**2)


def _band(posterior: lw.Posterior, grid: Tensor) -> Band:
    p: Any = posterior.predict(grid)
    return Band(
        precision=float(posterior.prior.precisions[0]),
        log_evidence=float(posterior.log_evidence()),
        epistemic_std=_list(p.epistemic.sqrt()),
        total_std=_list(p.std),
    )


def _rows(fitted: Fitted, size: Size, generator: torch.Generator) -> list[RegressionRow]:
    rows = []
    for where, places in [("on the data", (LEFT, RIGHT)), ("in the gap", (GAP,))]:
        x, y = fitted.curve.measure(400, places, generator)
        sampled: Any = fitted.posterior.predict(x, predictive="bnn", n_samples=size.n_samples, generator=generator)
        glm: Any = fitted.posterior.predict(x)
        plain = _map_prediction(fitted.model, x, fitted.train)
        rows += [
            _row("MAP", where, plain, y, plain.log_prob(y)),
            _row("sampled network", where, Gaussians(sampled.mean, sampled.std), y, sampled.log_prob(y)),
            _row("GLM", where, Gaussians(glm.mean, glm.std), y, glm.log_prob(y)),
        ]
    return rows


def _mean_rows(runs: list[list[RegressionRow]]) -> list[RegressionRow]:
    return [
        RegressionRow(
            method=rows[0]["method"],
            where=rows[0]["where"],
            rmse=fmean(r["rmse"] for r in rows),
            nll=fmean(r["nll"] for r in rows),
            coverage=fmean(r["coverage"] for r in rows),
            width=fmean(r["width"] for r in rows),
        )
        for rows in zip(*runs, strict=True)
    ]


def _map_prediction(model: nn.Module, x: Tensor, train: tuple[Tensor, Tensor]) -> Gaussians:
    """The baseline without a posterior: a constant noise level from the training residuals."""
    with torch.no_grad():
        f = model(x)
        noise_std = metrics.rmse(model(train[0]), train[1])
    return Gaussians(f, torch.full_like(f, noise_std))


def _row(method: str, where: str, p: Gaussians, y: Tensor, log_prob: Tensor) -> RegressionRow:
    half = 1.959963984540054 * p.std
    return RegressionRow(
        method=method,
        where=where,
        rmse=metrics.rmse(p.mean, y),
        nll=metrics.nll(log_prob),
        coverage=metrics.coverage(p.mean - half, p.mean + half, y),
        width=float(2 * half.mean()),
    )


def _list(values: Tensor) -> list[float]:
    """A column as plain numbers with six digits, enough for a figure."""
    return [round(v, 6) if math.isfinite(v) else v for v in values.detach().double().flatten().tolist()]
