"""Comparison with temperature scaling and deep ensembles of five, on networks of tens of thousands of parameters.

Training and test data of a task are the same at every seed. Networks and held-out rows differ, so the networks of five
seeds form an ensemble.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import InputError
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import scores
from lapwing_studies.reproduce.architectures import seeded
from lapwing_studies.reproduce.claims import Claim, at_least
from lapwing_studies.reproduce.image_networks import staged_resnet
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.pairs import Pair, pair
from lapwing_studies.reproduce.parts import Parts, Split, shuffled
from lapwing_studies.reproduce.study import Record, Study, done
from lapwing_studies.reproduce.training import Recipe, train

N_HELD_OUT = 1_000
_ENSEMBLE = "ensemble"


def run(study: Study) -> Record:
    """Every task whose data are available, at every seed; then the ensembles of the networks of all seeds."""
    tasks = [task for task in TASKS if all(map(study.folder.holds, task.files))]
    if not tasks:
        raise InputError("quality: no data. Name the folder that holds them: --data FOLDER.")
    record = study.record("quality", [QualityJob(task, seed, study) for task in tasks for seed in study.seeds])
    return {**record, "ensembles": done(study, [EnsembleJob(task, study) for task in tasks])}


@dataclass(frozen=True)
class QualityJob:
    task: Pair
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"{self.task.name}-{self.seed}"

    @property
    def made_with(self) -> str:
        effort = self.task.learnt_with(self.study.effort)
        return f"{self.task.words} | {self.recipe} | {effort.n_train} rows | seed {self.seed}"

    @property
    def recipe(self) -> Recipe:
        return self.task.recipe.at_most(self.study.effort.n_epochs)

    @cached_property
    def parts(self) -> Parts:
        """Holds out a thousand rows, others at every seed."""
        effort = replace(self.task.learnt_with(self.study.effort), n_test=2 * self.study.effort.n_test)
        parts = self.task.source(self.study.folder, 0, effort)
        rows = shuffled(len(parts.validation), seed=self.seed)[:N_HELD_OUT]
        return replace(parts, validation=parts.validation.rows(rows))

    def network(self) -> nn.Module:
        return self.study.network(self, lambda: self.task.network(self.parts), self.parts, self.recipe)

    def run(self) -> Record:
        """CPU seconds; those of training are extrapolated from one epoch."""
        parts, model = self.parts, self.network()
        learnt, held_out = ((p.x, p.y) for p in (parts.train, parts.validation))
        posterior, fitted = _cpu(lambda: lw.fit(model, learnt, "classification", progress=False))
        tuned, tuning = _cpu(lambda: lw.tune(posterior, learnt, validation=held_out, progress=False))
        predicted, predicting = _cpu(lambda: _log_probs(tuned, parts.test.x))
        seconds = {"train": self._training(), "fit": fitted, "tune": tuning, "predict": predicting}
        f = scores.outputs(model, parts.test.x)
        ways = {
            "MAP": f.log_softmax(-1),
            "temperature": (f / scores.best_temperature(model, parts.validation)).log_softmax(-1),
            "Lapwing": predicted,
        }
        return Record(
            task=self.task.name,
            data=self.task.inside,
            network=self.task.words,
            seed=self.seed,
            parameters=n_parameters(model),
            structure=type(posterior.structure).__name__.lower(),
            n_train=len(parts.train),
            n_test=len(parts.test),
            seconds={key: round(value, 3) for key, value in seconds.items()},
            nll={way: _nll(log_p, parts.test) for way, log_p in ways.items()},
            accuracy={way: _accuracy(log_p, parts.test) for way, log_p in ways.items()},
            chosen=tuned.history[-1].note,
        )

    def _training(self) -> float:
        """One epoch of a new network, times the number of epochs."""
        fresh = seeded(lambda: self.task.network(self.parts), seed=self.seed)
        one = replace(self.recipe, n_epochs=1)
        _, seconds = _cpu(lambda: train(fresh, self.parts, nn.functional.cross_entropy, one, seed=self.seed))
        return seconds * self.recipe.n_epochs


@dataclass(frozen=True)
class EnsembleJob:
    """The mean of the probabilities of the networks of all seeds."""

    task: Pair
    study: Study

    @property
    def name(self) -> str:
        return f"{self.task.name}-{_ENSEMBLE}"

    @property
    def made_with(self) -> str:
        return " + ".join(job.made_with for job in self._members)

    @property
    def _members(self) -> list[QualityJob]:
        return [QualityJob(self.task, seed, self.study) for seed in self.study.seeds]

    def run(self) -> Record:
        test = self._members[0].parts.test
        each = torch.stack([scores.outputs(job.network(), test.x).log_softmax(-1) for job in self._members])
        log_p = each.logsumexp(0) - math.log(len(each))
        nll, accuracy = _nll(log_p, test), _accuracy(log_p, test)
        return Record(task=self.task.name, n_networks=len(each), nll=nll, accuracy=accuracy)


def _cpu(work: Callable[[], Any]) -> tuple[Any, float]:
    start = process_time()
    return work(), process_time() - start


def _log_probs(posterior: lw.Posterior, x: Tensor) -> Tensor:
    predictions: list[Any] = [posterior.predict(chunk) for chunk in x.split(scores.CHUNK)]
    return torch.cat([p.probs.detach().double() for p in predictions]).log()


def _nll(log_p: Tensor, test: Split) -> float:
    return float(nn.functional.nll_loss(log_p, test.y))


def _accuracy(log_p: Tensor, test: Split) -> float:
    return float((log_p.argmax(-1) == test.y).double().mean())


# --- what is asked of it ---------------------------------------------------------------------------------------

MARGIN = 0.005  # nats by which a task may be worse than temperature scaling


def gains(runs: list[Record]) -> list[float]:
    """Nats below temperature scaling, by seed."""
    return [run["nll"]["temperature"] - run["nll"]["Lapwing"] for run in runs]


def trainings(runs: list[Record]) -> float:
    """Cost of fit, tune and predict, in units of training one network."""
    ours = fmean(sum(run["seconds"][k] for k in ("fit", "tune", "predict")) for run in runs)
    return ours / fmean(run["seconds"]["train"] for run in runs)


def claims(record: Record) -> list[Claim]:
    tasks = grouped(record["runs"], "task")
    below = {name: fmean(gains(runs)) for name, runs in tasks.items()}
    worst, cost = min(below, key=below.__getitem__), max(map(trainings, tasks.values()))
    return [
        at_least("test NLL below temperature scaling's", len(tasks) - 1, [gain > 0 for gain in below.values()]),
        Claim("worst task against temperature scaling", f"≤ {MARGIN:+.3f}", f"{-below[worst]:+.4f} ({worst})",
              -below[worst] <= MARGIN),
        Claim("fit, tune and predict, in trainings of one network", "< 2", f"{cost:.2f} at most", cost < 2),
    ]  # fmt: skip


# --- the tasks: some of the alarm's pairs, with more training data ------------------------------------------------


def _resnet(parts: Parts) -> nn.Module:
    return staged_resnet(28, (16, 32, 64))


TASKS = (
    replace(pair("fashion-mnist"), network=_resnet, words="ResNet, BatchNorm", more=10),
    replace(pair("cifar-svhn"), name="cifar-10", more=10),
    replace(pair("ag-sst2"), name="ag-news"),
    replace(pair("sst2-ag"), name="sst2"),
)
