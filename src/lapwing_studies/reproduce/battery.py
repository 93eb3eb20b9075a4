"""The battery: fit, tune and predict with default arguments on many tasks, against methods without a posterior."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

from torch import nn

import lapwing as lw
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import scores
from lapwing_studies.reproduce.architectures import seeded
from lapwing_studies.reproduce.parts import Parts, Split
from lapwing_studies.reproduce.scores import ScoreRow
from lapwing_studies.reproduce.study import Study, done, timed, told
from lapwing_studies.reproduce.tasks import Task, listed
from lapwing_studies.reproduce.training import train

METHODS = ("MAP", "temperature", "evidence", "evidence + validation")


class Run(TypedDict):
    """One task at one seed. `concerns`: those of `diagnose()` for the posterior tuned by the evidence alone. `chosen`:
    what held-out data chose."""

    task: str
    seed: int
    kind: str
    network: str
    stops: str
    outside: str
    parameters: int
    structure: str
    n_train: int
    n_validation: int
    n_test: int
    seconds: dict[str, float]
    scores: list[ScoreRow]
    concerns: list[str]
    notices: list[str]
    chosen: str


class BatteryRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    runs: list[Run]


def run(study: Study) -> BatteryRecord:
    """Every task whose data are available, at every seed."""
    runs = done(study, jobs(study))
    return BatteryRecord(study="battery", effort=study.effort.name, n_seeds=study.n_seeds, runs=runs)


def jobs(study: Study) -> list[BatteryJob]:
    return [BatteryJob(task, seed, study) for task in listed(study.folder) for seed in study.seeds]


@dataclass(frozen=True)
class BatteryJob:
    task: Task
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"{self.task.name}-{self.seed}"

    @property
    def made_with(self) -> str:
        effort = self.study.effort
        recipe = self.task.trained_with(effort)
        return f"{self.task.words} | {recipe} | {effort.n_train} rows, {effort.n_test} tested | seed {self.seed}"

    @cached_property
    def parts(self) -> Parts:
        return self.task.source(self.study.folder, self.seed, self.study.effort)

    def network(self) -> nn.Module:
        """The trained network, from the store if it is there."""
        model = seeded(lambda: self.task.network(self.parts), seed=self.seed)
        if not self.study.store.load_weights(self.name, self.made_with, model):
            train(model, self.parts, self.task.loss, self.task.trained_with(self.study.effort), seed=self.seed)
            self.study.store.keep_weights(self.name, self.made_with, model)
        return model.eval()

    def run(self) -> Run:
        """Train, fit, tune in both ways, and score all four methods."""
        parts = self.parts
        model, trained = timed(self.network)
        posterior, fitted = timed(lambda: lw.fit(model, _pair(parts.train), self.task.likelihood))
        with warnings.catch_warnings(record=True) as caught:  # kept in the record
            warnings.simplefilter("always")
            alone, first = timed(lambda: lw.tune(posterior, _pair(parts.train)))
            both, second = timed(lambda: lw.tune(posterior, _pair(parts.train), validation=_pair(parts.validation)))
        rows, scored = timed(lambda: self._scores(model, alone, both))
        seconds = {"train": trained, "fit": fitted, "evidence": first, "validation": second, "score": scored}
        return Run(
            task=self.task.name,
            seed=self.seed,
            kind=self.task.kind,
            network=self.task.words,
            stops=self.task.recipe.stops,
            outside=parts.outside_is,
            parameters=n_parameters(model),
            structure=type(posterior.structure).__name__.lower(),
            n_train=len(parts.train),
            n_validation=len(parts.validation),
            n_test=len(parts.test),
            seconds={key: round(value, 3) for key, value in seconds.items()},
            scores=rows,
            concerns=[str(finding) for finding in alone.diagnose().concerns],
            notices=told(caught),
            chosen=both.history[-1].note,
        )

    def _scores(self, model: nn.Module, alone: lw.Posterior, both: lw.Posterior) -> list[ScoreRow]:
        parts, classes = self.parts, self.task.kind != "numbers"
        plain: list[Any]
        if classes:
            best = scores.best_temperature(model, parts.validation)
            plain = [scores.map_classes(model, parts, temperature=t) for t in (1.0, best)]
        else:
            plain = [scores.map_numbers(model, parts, split) for split in (parts.train, parts.validation)]
        tuned = [scores.of_posterior(posterior, parts, classes=classes) for posterior in (alone, both)]
        return [p.score(method, parts.test.y) for method, p in zip(METHODS, [*plain, *tuned], strict=True)]


def _pair(split: Split) -> Any:
    return split.x, split.y
