"""The battery: fit, tune and predict with default arguments on many tasks, against methods without a posterior."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

import lapwing as lw
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import scores
from lapwing_studies.reproduce.parts import Parts, Split
from lapwing_studies.reproduce.scores import ScoreRow
from lapwing_studies.reproduce.study import Record, Study, timed, told
from lapwing_studies.reproduce.tasks import Task, listed

METHODS = ("MAP", "temperature", "evidence", "evidence + validation")


def run(study: Study) -> Record:
    """Every task whose data are available, at every seed."""
    return study.record("battery", jobs(study))


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
        recipe = self.task.trained_with(self.study.effort)
        return self.study.network(self, lambda: self.task.network(self.parts), self.parts, recipe, self.task.loss)

    def run(self) -> Record:
        """Train, fit, tune in both ways, and score all four methods.

        `concerns`: those of `diagnose()` for the posterior tuned by the evidence alone. `chosen`: what held-out data
        chose.
        """
        parts = self.parts
        model, trained = timed(self.network)
        posterior, fitted = timed(lambda: lw.fit(model, _pair(parts.train), self.task.likelihood))
        with warnings.catch_warnings(record=True) as caught:  # kept in the record
            warnings.simplefilter("always")
            alone, first = timed(lambda: lw.tune(posterior, _pair(parts.train)))
            both, second = timed(lambda: lw.tune(posterior, _pair(parts.train), validation=_pair(parts.validation)))
        rows, scored = timed(lambda: self._scores(model, alone, both))
        seconds = {"train": trained, "fit": fitted, "evidence": first, "validation": second, "score": scored}
        return Record(
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
