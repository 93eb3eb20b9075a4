"""Where the evidence is evaluated, and with how many precisions: the table of Antorán et al. (2022), scaled down."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean

from torch import nn

import lapwing as lw
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import scores, sources
from lapwing_studies.reproduce.choices import MODES, tuned, typical_precision
from lapwing_studies.reproduce.claims import Claim, at_least
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.image_networks import NETWORKS, NORMALISED
from lapwing_studies.reproduce.means import grouped, where
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.study import Record, Study, timed, told
from lapwing_studies.reproduce.training import Recipe

RECIPE = Recipe(n_epochs=60, learning_rate=2e-3, patience=5)
STRUCTURE = "kron"
N_TEST = 500
WAYS = tuple((evidence, prior) for evidence in MODES for prior in ("single", "multiple"))


def run(study: Study) -> Record:
    """Every network at every seed, tuned in all four ways."""
    jobs = [AntoranJob(name, seed, study) for name in NETWORKS for seed in study.seeds]
    return study.record("antoran2022", jobs)


@dataclass(frozen=True)
class AntoranJob:
    network_name: str
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"{self.network_name}-{self.seed}"

    @property
    def data(self) -> str:
        return "MNIST, 12 × 12" if self.study.folder.holds("mnist") else "scikit-learn digits, 8 × 8"

    @property
    def effort(self) -> Effort:
        """Fewer test images than in other studies, as each network is scored five times."""
        return replace(self.study.effort, n_test=min(self.study.effort.n_test, N_TEST))

    @property
    def recipe(self) -> Recipe:
        return RECIPE.at_most(self.effort.n_epochs)

    @property
    def made_with(self) -> str:
        effort = self.effort
        return f"{self.data} | {self.recipe} | {effort.n_train} rows, {effort.n_test} tested | seed {self.seed}"

    @cached_property
    def parts(self) -> Parts:
        mnist = partial(sources.small_grey_images, "mnist", "fashion_mnist")
        source = mnist if self.study.folder.holds("mnist") else sources.digits
        return source(self.study.folder, self.seed, self.effort)

    def network(self) -> nn.Module:
        side = self.parts.train.x.shape[-1]
        return self.study.network(self, lambda: NETWORKS[self.network_name](side), self.parts, self.recipe)

    def run(self) -> Record:
        parts = self.parts
        model, trained = timed(self.network)
        data = (parts.train.x, parts.train.y)
        posterior, fitted = timed(lambda: lw.fit(model, data, "classification", structure=STRUCTURE))
        with warnings.catch_warnings(record=True) as caught:  # kept in the record
            warnings.simplefilter("always")
            rows = [self._row(*way, model, posterior) for way in WAYS]
        return Record(
            network=self.network_name,
            seed=self.seed,
            data=self.data,
            parameters=n_parameters(model),
            n_train=len(parts.train),
            n_validation=len(parts.validation),
            n_test=len(parts.test),
            seconds={"train": round(trained, 2), "fit": round(fitted, 2)},
            rows=[self._plain(model), *rows],
            notices=told(caught),
        )

    def _row(self, evidence: str, prior: str, model: nn.Module, posterior: lw.Posterior) -> Record:
        data = (self.parts.train.x, self.parts.train.y)
        several = "normalised" if self.network_name in NORMALISED else "layer"
        groups = "one" if prior == "single" else several
        chosen, seconds = timed(lambda: tuned(posterior, model, data, evidence, groups))
        score = scores.of_posterior(chosen, self.parts, classes=True).score("", self.parts.test.y)
        return _row(evidence, prior, groups, typical_precision(chosen), score, seconds)

    def _plain(self, model: nn.Module) -> Record:
        score = scores.map_classes(model, self.parts).score("", self.parts.test.y)
        return _row("none (MAP)", "–", "–", None, score, 0.0)


def _row(
    evidence: str, prior: str, groups: str, precision: float | None, score: scores.ScoreRow, seconds: float
) -> Record:
    """One way of tuning. `precision` is the geometric mean over weights; the plain network has none."""
    head = Record(evidence=evidence, prior=prior, groups=groups, precision=precision)
    found = {key: value for key, value in score.items() if key != "method"}
    return {**head, **found, "seconds": round(seconds, 2)}


def networks(record: Record) -> list[str]:
    return list(grouped(record["runs"], "network"))


def values(record: Record, network: str, way: tuple[str, str], key: str) -> list[float]:
    """One number per seed."""
    rows = [row for run in where(record["runs"], network=network) for row in run["rows"]]
    return [row[key] for row in rows if (row["evidence"], row["prior"]) == way]


def claims(record: Record) -> list[Claim]:
    def at(network: str, *way: str) -> float:
        return fmean(values(record, network, way, "nll"))  # type: ignore[arg-type]

    names, priors = networks(record), ("single", "multiple")
    modes = [at(n, "linear mode", p) < at(n, "trained weights", p) for n in names for p in priors]
    best = [at(n, "linear mode", "multiple") <= min(at(n, *way) for way in WAYS) for n in names]
    found = [at(n, *way) for n in names for way in WAYS]
    return [
        at_least("the evidence at the linear mode gives a smaller NLL than at the trained weights", 9, modes),
        at_least("with several precisions the smallest of all", 4, best),
        Claim("values of the table", ".016 to .310",
              f"{min(found):.3f} to {max(found):.3f}: less data, networks of our own, Kronecker factors", None),
        Claim("the same for a U-Net, and for ResNet-50 on CIFAR-10", "linear mode better", "not run: too large", None),
    ]  # fmt: skip
