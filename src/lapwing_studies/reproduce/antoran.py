"""Where the evidence is evaluated, and with how many precisions: the table of Antorán et al. (2022), scaled down."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypedDict

from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import scores, sources
from lapwing_studies.reproduce.architectures import seeded
from lapwing_studies.reproduce.choices import MODES, tuned, typical_precision
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.image_networks import NETWORKS, NORMALISED
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.study import Study, done, timed, told
from lapwing_studies.reproduce.training import Recipe, train

RECIPE = Recipe(n_epochs=60, learning_rate=2e-3, patience=5)
STRUCTURE = "kron"
N_TEST = 500


class Row(TypedDict):
    """One way of tuning. `precision` is the geometric mean over weights; the plain network has none."""

    evidence: str
    prior: str
    groups: str
    precision: float | None
    nll: float
    ece: float
    error: float
    ood_auc: float
    seconds: float


class AntoranRun(TypedDict):
    network: str
    seed: int
    data: str
    parameters: int
    n_train: int
    n_validation: int
    n_test: int
    seconds: dict[str, float]
    rows: list[Row]
    notices: list[str]


class AntoranRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    runs: list[AntoranRun]


def run(study: Study) -> AntoranRecord:
    """Every network at every seed, tuned in all four ways."""
    jobs = [AntoranJob(name, seed, study) for name in NETWORKS for seed in study.seeds]
    return AntoranRecord(study="antoran2022", effort=study.effort.name, n_seeds=study.n_seeds, runs=done(study, jobs))


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
        model = seeded(lambda: NETWORKS[self.network_name](self.parts.train.x.shape[-1]), seed=self.seed)
        if not self.study.store.load_weights(self.name, self.made_with, model):
            train(model, self.parts, _loss, self.recipe, seed=self.seed)
            self.study.store.keep_weights(self.name, self.made_with, model)
        return model.eval()

    def run(self) -> AntoranRun:
        parts = self.parts
        model, trained = timed(self.network)
        data = (parts.train.x, parts.train.y)
        posterior, fitted = timed(lambda: lw.fit(model, data, "classification", structure=STRUCTURE))
        with warnings.catch_warnings(record=True) as caught:  # kept in the record
            warnings.simplefilter("always")
            rows = [
                self._row(evidence, prior, model, posterior) for evidence in MODES for prior in ("single", "multiple")
            ]
        return AntoranRun(
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

    def _row(self, evidence: str, prior: str, model: nn.Module, posterior: lw.Posterior) -> Row:
        data = (self.parts.train.x, self.parts.train.y)
        several = "normalised" if self.network_name in NORMALISED else "layer"
        groups = "one" if prior == "single" else several
        chosen, seconds = timed(lambda: tuned(posterior, model, data, evidence, groups))
        score = scores.of_posterior(chosen, self.parts, classes=True).score("", self.parts.test.y)
        return _row(evidence, prior, groups, typical_precision(chosen), score, seconds)

    def _plain(self, model: nn.Module) -> Row:
        score = scores.map_classes(model, self.parts).score("", self.parts.test.y)
        return _row("none (MAP)", "–", "–", None, score, 0.0)


def _row(
    evidence: str, prior: str, groups: str, precision: float | None, score: scores.ScoreRow, seconds: float
) -> Row:
    return Row(
        evidence=evidence,
        prior=prior,
        groups=groups,
        precision=precision,
        nll=score["nll"],
        ece=score["ece"],
        error=score["error"],
        ood_auc=score["ood_auc"],
        seconds=round(seconds, 2),
    )


def _loss(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f, y)
