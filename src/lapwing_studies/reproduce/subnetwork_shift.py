"""Subnetwork inference under shift: rotated MNIST and corrupted CIFAR-10, after Daxberger et al. (2021).

A full covariance over k weights beside the trained network, a diagonal posterior, SWAG, MC dropout and five networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.means import grouped, where
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.scores import outputs
from lapwing_studies.reproduce.shifts import ANGLES, SEVERITIES, corrupted, rotated
from lapwing_studies.reproduce.study import Record, Study, timed
from lapwing_studies.reproduce.subnetwork_baselines import convolutional, dense, dropout_draws, swag_draws
from lapwing_studies.reproduce.training import Recipe

Predict = Callable[[Tensor], Tensor]
PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)  # chosen by validation NLL, for every method by itself
MOST_SEEDS = {("full", "corrupted"): 1}  # seven networks and six posteriors: an hour of one core for each
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
    "full": Tier(10_000, 2000, 40, (200, 1000), ("rotated", "corrupted"), n_snapshots=32),
    "faithful": Tier(40_000, 10_000, 200, (1000, 10_000), ("rotated", "corrupted")),
}


def run(study: Study) -> Record:
    tier = TIERS[study.effort.name]
    seeds = {kind: study.seeds[: MOST_SEEDS.get((study.effort.name, kind))] for kind in tier.kinds}
    jobs = [ShiftJob(study, tier, kind, seed) for kind in tier.kinds for seed in seeds[kind]]
    sizes = list(tier.sizes)
    return study.record("subnetwork", jobs, n_train=tier.n_train, n_test=tier.n_test, sizes=sizes)


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
        tier, folder = self.tier, self.study.folder
        name = "cifar10" if self.kind == "corrupted" else "mnist" if folder.holds("mnist") else "digits"
        return sources.images(name, folder, self.seed, tier.n_train, tier.n_test, small=True)

    def run(self) -> Record:
        (rows, precisions), seconds = timed(self._scored)
        return Record(kind=self.kind, seed=self.seed, seconds=seconds, precisions=precisions, rows=rows)

    def _scored(self) -> tuple[list[Record], dict[str, float]]:
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
        recipe, seed = Recipe(self.tier.epochs, 1e-3), 100 * self.seed + number
        make = partial(build, channels, side, dropout)
        return self.study.network(self, make, self.parts, recipe, name=name, seed=seed)

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


def _score(method: str, level: int, probs: Tensor, y: Tensor) -> Record:
    picked = probs.gather(1, y[:, None])[:, 0].clamp(min=1e-12)
    return Record(
        method=method,
        level=level,
        error=1 - metrics.accuracy(probs, y),
        ll=float(picked.log().mean()),
        brier=metrics.brier(probs, y),
        ece=metrics.ece(probs, y, n_bins=10),
    )


def by_level(record: Record, kind: str, method: str, key: str) -> dict[int, list[float]]:
    """One score by level; a value for each seed."""
    rows = [row for run in where(record["runs"], kind=kind) for row in where(run["rows"], method=method)]
    return {level: [row[key] for row in some] for level, some in grouped(rows, "level").items()}


def far(record: Record, kind: str, method: str) -> list[float]:
    """Log likelihoods where the shift is large, means over seeds."""
    return [fmean(v) for level, v in by_level(record, kind, method, "ll").items() if level >= FAR[kind]]


def claims(record: Record) -> list[Claim]:
    found = []
    for kind in grouped(record["runs"], "kind"):
        k, start = record["sizes"][-1], f"{FAR[kind]}°" if kind == "rotated" else f"severity {FAR[kind]}"
        ours = far(record, kind, f"{SUBNETWORK} {k}")
        for other, at_each in (("MAP", True), (f"{RANDOM} {k}", True), ("diagonal", False), ("SWAG", False),
                               ("dropout", False), ("ensemble", False)):  # fmt: skip
            theirs = far(record, kind, other)
            holds = all(a > b for a, b in zip(ours, theirs, strict=True)) if at_each else fmean(ours) > fmean(theirs)
            words = "at every step" if at_each else "on average"
            found.append(Claim(f"{kind}: subnetwork of {k} above {other} in log likelihood {words} from {start} on",
                               "above", f"mean {fmean(ours):.2f} against {fmean(theirs):.2f}", holds))  # fmt: skip
    if not where(record["runs"], kind="corrupted"):
        found.append(Claim("corrupted CIFAR-10: the same", "above", "not run in this tier", None))
    large = "above VOGN; ResNet-18 with 42,000 of its 11 million weights"
    outside = "OOD-AUC, MNIST against Fashion-MNIST and CIFAR-10 against SVHN"
    return [*found, Claim(large, "above", "not run: too large", None), Claim(outside, "a plot", "not measured", None)]
