"""Subnetwork inference under shift: rotated MNIST and corrupted CIFAR-10, after Daxberger et al. (2021).

A full covariance over k weights beside the trained network, a diagonal posterior, SWAG, MC dropout and five networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.architectures import seeded
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.scores import outputs
from lapwing_studies.reproduce.shifts import ANGLES, SEVERITIES, corrupted, rotated
from lapwing_studies.reproduce.study import Study, done, timed
from lapwing_studies.reproduce.subnetwork_baselines import convolutional, dense, dropout_draws, swag_draws
from lapwing_studies.reproduce.training import Recipe, train

Predict = Callable[[Tensor], Tensor]
PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)  # chosen by validation NLL, for every method by itself
FAR = {"rotated": 60, "corrupted": 3}  # from here on the shift is large
SUBNETWORK, RANDOM = "subnetwork", "random subnetwork"


@dataclass(frozen=True)
class Tier:
    n_train: int
    n_test: int
    epochs: int
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    n_networks: int = 5
    n_samples: int = 30
    n_snapshots: int = 256


TIERS = {
    "toy": Tier(80, 30, 1, (10,), ("rotated",), 2, 3, 3),
    "quick": Tier(2000, 500, 100, (50, 500), ("rotated",), n_snapshots=40),
    "full": Tier(10_000, 2000, 40, (50, 200, 1000), ("rotated", "corrupted")),
    "faithful": Tier(40_000, 10_000, 200, (1000, 10_000), ("rotated", "corrupted")),
}


class ShiftRow(TypedDict):
    method: str
    level: int
    error: float
    ll: float
    brier: float
    ece: float


class ShiftRun(TypedDict):
    kind: str
    seed: int
    seconds: float
    precisions: dict[str, float]
    rows: list[ShiftRow]


class SubnetworkShiftRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    n_train: int
    n_test: int
    sizes: list[int]
    runs: list[ShiftRun]


def run(study: Study) -> SubnetworkShiftRecord:
    tier = TIERS[study.effort.name]
    jobs = [ShiftJob(study, tier, kind, seed) for seed in study.seeds for kind in tier.kinds]
    return SubnetworkShiftRecord(
        study="subnetwork", effort=study.effort.name, n_seeds=study.n_seeds, n_train=tier.n_train, n_test=tier.n_test,
        sizes=list(tier.sizes), runs=done(study, jobs),
    )  # fmt: skip


@dataclass(frozen=True)
class ShiftJob:
    study: Study
    tier: Tier
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}"

    @property
    def made_with(self) -> str:
        return f"{self.tier} {PRECISIONS} v2"

    @cached_property
    def parts(self) -> Parts:
        tier = self.tier
        effort = Effort(self.study.effort.name, tier.n_train, tier.n_test, tier.epochs, 1)
        if self.kind == "corrupted":
            return sources.colour_images(self.study.folder, self.seed, effort)
        if self.study.folder.holds("mnist"):
            return sources.small_grey_images("mnist", "fashion_mnist", self.study.folder, self.seed, effort)
        return sources.digits(self.study.folder, self.seed, effort)

    def run(self) -> ShiftRun:
        (rows, precisions), seconds = timed(self._scored)
        return ShiftRun(kind=self.kind, seed=self.seed, seconds=seconds, precisions=precisions, rows=rows)

    def _scored(self) -> tuple[list[ShiftRow], dict[str, float]]:
        levels = ANGLES if self.kind == "rotated" else SEVERITIES
        shift = rotated if self.kind == "rotated" else corrupted
        rows, precisions = [], {}
        for method, predict, precision in self._methods():
            for level in levels:
                rows.append(_score(method, level, predict(shift(self.parts.test.x, level)), self.parts.test.y))
            if precision is not None:
                precisions[method] = precision
        return rows, precisions

    def _methods(self) -> Iterator[tuple[str, Predict, float | None]]:
        models = [self._trained(seed) for seed in range(self.tier.n_networks)]
        yield "MAP", _network(models[0]), None
        yield "ensemble", lambda x: torch.stack([_network(m)(x) for m in models]).mean(0), None
        generator = torch.Generator().manual_seed(self.seed)
        dropout = self._trained(0, dropout=0.1)
        yield "dropout", lambda x: dropout_draws(dropout, x, self.tier.n_samples, generator), None
        drawn = swag_draws(models[0], self.parts.train, self.tier.n_samples, self.seed)
        yield "SWAG", lambda x: torch.stack([_network(m)(x) for m in drawn]).mean(0), None
        yield ("diagonal", *self._best(self._fitted(models[0], "all", "diag")))
        for k in self.tier.sizes:
            scores: dict[str, Any] = {
                SUBNETWORK: lw.Swag(n_snapshots=self.tier.n_snapshots),
                RANDOM: lw.RandomScore(generator),
            }
            for method, score in scores.items():
                chosen = lw.Subnetwork(score, k, weights_only=True)
                yield (f"{method} {k}", *self._best(self._fitted(models[0], chosen, "full")))

    def _trained(self, number: int, dropout: float = 0.0) -> nn.Module:
        name = f"{self.name}-{number}{'-dropout' if dropout else ''}"
        channels, side = self.parts.train.x.shape[1:3]
        build = dense if self.kind == "rotated" else convolutional
        model = seeded(lambda: build(channels, side, dropout), seed=100 * self.seed + number)
        if not self.study.store.load_weights(name, self.made_with, model):
            recipe = Recipe(self.tier.epochs, 1e-3)
            train(model, self.parts, nn.functional.cross_entropy, recipe, seed=100 * self.seed + number)
            self.study.store.keep_weights(name, self.made_with, model)
        return model.eval()

    def _fitted(self, model: nn.Module, params: Any, structure: str) -> lw.Posterior:
        rows = (self.parts.train.x, self.parts.train.y)
        return lw.fit(model, rows, "classification", params=params, structure=structure, prior=1.0, progress=False)

    def _best(self, posterior: lw.Posterior) -> tuple[Predict, float]:
        """The precision with the best validation NLL."""
        held_out = self.parts.validation
        nll = {}
        for precision in PRECISIONS:
            log_prob = _of(posterior.with_prior(precision))(held_out.x).log()
            nll[precision] = -float(log_prob.gather(1, held_out.y[:, None]).mean())
        best = min(nll, key=lambda precision: nll[precision])
        return _of(posterior.with_prior(best)), best


def _network(model: nn.Module) -> Predict:
    return lambda x: outputs(model, x).softmax(-1)


def _of(posterior: lw.Posterior) -> Predict:
    return lambda x: torch.cat([posterior.predict(chunk).probs.detach().double() for chunk in x.split(250)])


def _score(method: str, level: int, probs: Tensor, y: Tensor) -> ShiftRow:
    picked = probs.gather(1, y[:, None])[:, 0].clamp(min=1e-12)
    return ShiftRow(
        method=method,
        level=level,
        error=1 - metrics.accuracy(probs, y),
        ll=float(picked.log().mean()),
        brier=metrics.brier(probs, y),
        ece=metrics.ece(probs, y, n_bins=10),
    )


def curve(record: SubnetworkShiftRecord, kind: str, method: str, key: str) -> dict[int, float]:
    """The mean over seeds by level."""
    found: dict[int, list[float]] = {}
    for shift in (shift for shift in record["runs"] if shift["kind"] == kind):
        for row in (row for row in shift["rows"] if row["method"] == method):
            found.setdefault(row["level"], []).append(float(row[key]))  # type: ignore[literal-required]
    return {level: fmean(values) for level, values in found.items()}


def far(record: SubnetworkShiftRecord, kind: str, method: str) -> list[float]:
    """Log likelihoods where the shift is large."""
    return [value for level, value in curve(record, kind, method, "ll").items() if level >= FAR[kind]]


def claims(record: SubnetworkShiftRecord) -> list[Claim]:
    found = []
    for kind in dict.fromkeys(shift["kind"] for shift in record["runs"]):
        k, start = record["sizes"][-1], f"{FAR[kind]}°" if kind == "rotated" else f"severity {FAR[kind]}"
        ours = far(record, kind, f"{SUBNETWORK} {k}")
        for other, every in (("MAP", True), (f"{RANDOM} {k}", True), ("diagonal", False), ("SWAG", False),
                             ("dropout", False), ("ensemble", False)):  # fmt: skip
            theirs = far(record, kind, other)
            holds = all(a > b for a, b in zip(ours, theirs, strict=True)) if every else fmean(ours) > fmean(theirs)
            words = "at every step" if every else "on average"
            found.append(Claim(f"{kind}: subnetwork of {k} above {other} in log likelihood {words} from {start} on",
                               "above", f"mean {fmean(ours):.2f} against {fmean(theirs):.2f}", holds))  # fmt: skip
    if not any(shift["kind"] == "corrupted" for shift in record["runs"]):
        found.append(Claim("corrupted CIFAR-10: the same", "above", "not run in this tier", None))
    return found
