"""Conformal intervals on UCI regression: scaled by the posterior, and of constant width."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import scores, sources
from lapwing_studies.reproduce.architectures import mlp
from lapwing_studies.reproduce.claims import Claim, at_least
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.parts import Parts, Split
from lapwing_studies.reproduce.study import Record, Study, timed
from lapwing_studies.reproduce.training import Recipe

LEVEL = 0.9
LEAST = 9  # held-out rows below which an interval of level 0.9 is infinite
NAMES = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
RECIPE = Recipe(n_epochs=100, learning_rate=3e-3)
HIDDEN = (50, 50)


def run(study: Study) -> Record:
    study.folder.check("uci_regression")
    jobs = [ConformalJob(name, seed, study) for name in NAMES for seed in study.seeds]
    return study.record("conformal", jobs)


@dataclass(frozen=True)
class ConformalJob:
    data: str
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"{self.data}-{self.seed}"

    @property
    def made_with(self) -> str:
        effort = self.study.effort
        recipe = RECIPE.at_most(effort.n_epochs)
        return f"MLP {HIDDEN} ReLU | {recipe} | {effort.n_train} rows, {effort.n_test} tested | seed {self.seed}"

    @cached_property
    def parts(self) -> Parts:
        return sources.uci_numbers(self.data, self.study.folder, self.seed, self.study.effort)

    def network(self) -> nn.Module:
        widths = [self.parts.train.x.shape[1], *HIDDEN, 1]
        recipe, loss = RECIPE.at_most(self.study.effort.n_epochs), nn.functional.mse_loss
        return self.study.network(self, lambda: mlp(widths, nn.ReLU), self.parts, recipe, loss)

    def run(self) -> Record:
        """Half of the held-out rows tune, the other half (at least nine) calibrates both kinds of interval."""
        parts, n_held_out = self.parts, len(self.parts.validation)
        n = min(n_held_out // 2, n_held_out - LEAST)
        tune_on, calibrate_on = (parts.validation.rows(rows) for rows in (slice(n), slice(n, None)))
        learnt = (parts.train.x, parts.train.y)
        model, trained = timed(self.network)
        posterior, fitted = timed(lambda: lw.fit(model, learnt, "regression", progress=False))
        with warnings.catch_warnings():  # naval has columns that are constant
            warnings.simplefilter("ignore")
            held_out = (tune_on.x, tune_on.y)
            tuned, tuning = timed(lambda: lw.tune(posterior, learnt, validation=held_out, progress=False))
        made, calibrated = timed(lambda: lw.conformal(tuned, (calibrate_on.x, calibrate_on.y), LEVEL, progress=False))
        predicted: Any = made.predict(parts.test.x)
        low, high = (v.detach().double() for v in predicted.interval)
        seconds = {"train": trained, "fit": fitted, "tune": tuning, "conformal": calibrated}
        return Record(
            data=self.data,
            seed=self.seed,
            parameters=n_parameters(model),
            structure=type(posterior.structure).__name__.lower(),
            n_train=len(parts.train),
            n_tuned=len(tune_on),
            n_calibrated=len(calibrate_on),
            n_test=len(parts.test),
            exact=made.coverage,
            seconds={key: round(value, 3) for key, value in seconds.items()},
            scaled=_interval(low, high, parts.test.y.double()),
            constant=_constant_width(model, calibrate_on, parts.test),
        )


def _constant_width(model: nn.Module, held_out: Split, test: Split) -> Record:
    """Split conformal prediction without a posterior: f ± the residual of rank ⌈(n + 1) level⌉ of the same rows."""
    residuals = (scores.outputs(model, held_out.x) - held_out.y.double()).abs().flatten().sort().values
    half = residuals[math.ceil((len(residuals) + 1) * LEVEL) - 1]
    f = scores.outputs(model, test.x)
    return _interval(f - half, f + half, test.y.double())


def _interval(low: Tensor, high: Tensor, y: Tensor) -> Record:
    """Coverage and mean length of intervals for test targets, in standard deviations of the training targets."""
    covered = ((low <= y) & (y <= high)).double().mean()
    return Record(coverage=round(float(covered), 4), length=round(float((high - low).mean()), 4))


def ratios(runs: list[Record]) -> list[float]:
    """Mean length scaled by the posterior over constant length, by seed."""
    return [run["scaled"]["length"] / run["constant"]["length"] for run in runs]


def claims(record: Record) -> list[Claim]:
    sets = grouped(record["runs"], "data").values()
    covered = [fmean(run[kind]["coverage"] for runs in sets for run in runs) for kind in ("scaled", "constant")]
    shorter = [sum(run["scaled"]["length"] for run in runs) < sum(run["constant"]["length"] for run in runs)
               for runs in sets]  # fmt: skip
    return [
        at_least("intervals scaled by the posterior's standard deviation are shorter than constant ones",
                 math.ceil(6 * len(shorter) / 8), shorter),
        Claim("test targets are covered, within two points, by both kinds of interval", f"{LEVEL:.1%}",
              f"{covered[0]:.1%} scaled, {covered[1]:.1%} constant", max(abs(c - LEVEL) for c in covered) <= 0.02),
    ]  # fmt: skip
