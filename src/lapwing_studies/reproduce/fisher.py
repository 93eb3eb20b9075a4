"""Compare kinds of Fisher: exact columns, random combinations of them, and labels drawn from the model.

Networks with several classes, fitted with Kronecker factors and tuned with held-out data: the cost of a fit, and the
effect of sampling on the test NLL, on variances and on the evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import process_time
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce import scores
from lapwing_studies.reproduce.battery import BatteryJob
from lapwing_studies.reproduce.study import Study, done
from lapwing_studies.reproduce.tasks import Task, listed

TASKS = ("digits-mlp", "digits-cnn", "vehicle", "waveform", "fashion-mnist", "mnist", "cifar-10")
PRECISION = 10.0  # of the prior under which variances and evidence are compared
_LOOKED_AT = 100  # test inputs on which variances are compared


def _kinds(seed: int) -> dict[str, Any]:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    kinds: dict[str, Any] = {"exact": lw.Exact()}
    kinds |= {f"{s} sketch{'es' * (s > 1)}": lw.Sampled(generator(), s, lw.Signs()) for s in (1, 2, 4)}
    return kinds | {"1 label": lw.Sampled(generator(), 1, lw.Labels())}


class KindRow(TypedDict):
    """`variances`: root mean squared log ratio of output variances to the exact ones. `evidence`: nats per datum above
    the exact one."""

    kind: str
    gradient_epochs: float
    nll: float
    variances: float
    evidence: float


class FisherRun(TypedDict):
    task: str
    seed: int
    network: str
    n_train: int
    n_classes: int
    rows: list[KindRow]


class FisherRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    runs: list[FisherRun]


def run(study: Study) -> FisherRecord:
    tasks = [task for task in listed(study.folder) if task.name in TASKS]
    jobs = [FisherJob(task, seed, study) for task in tasks for seed in study.seeds]
    return FisherRecord(study="fisher", effort=study.effort.name, n_seeds=study.n_seeds, runs=done(study, jobs))


@dataclass(frozen=True)
class FisherJob:
    task: Task
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"fisher-{self.task.name}-{self.seed}"

    @property
    def made_with(self) -> str:
        return f"{BatteryJob(self.task, self.seed, self.study).made_with} | {', '.join(_kinds(0))}"

    def run(self) -> FisherRun:
        trained = BatteryJob(self.task, self.seed, self.study)
        model, parts = trained.network(), trained.parts
        train, held_out = (parts.train.x, parts.train.y), (parts.validation.x, parts.validation.y)
        epoch = _gradient_epoch(model, self.task.loss, *train)
        exact: lw.Posterior | None = None
        rows: list[KindRow] = []
        for kind, fisher in _kinds(self.seed).items():
            lw.fit(model, (train[0][:32], train[1][:32]), "classification", structure="kron", fisher=fisher)
            start = process_time()
            posterior = lw.fit(model, train, "classification", structure="kron", fisher=fisher, prior=PRECISION)
            seconds = process_time() - start
            exact = exact or posterior
            tuned = lw.tune(posterior, train, validation=held_out)
            score = scores.of_posterior(tuned, parts, classes=True).score(kind, parts.test.y)
            some = parts.test.x[:_LOOKED_AT]
            ratio = (posterior.outputs(some).var / exact.outputs(some).var).double().log()
            gained = float(posterior.log_evidence() - exact.log_evidence()) / len(train[1])
            rows.append(KindRow(
                kind=kind, gradient_epochs=round(seconds / epoch, 2), nll=score["nll"],
                variances=float(ratio.square().mean().sqrt()), evidence=gained,
            ))  # fmt: skip
        return FisherRun(
            task=self.task.name, seed=self.seed, network=self.task.words, n_train=len(parts.train),
            n_classes=parts.n_classes, rows=rows,
        )  # fmt: skip


def _gradient_epoch(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """CPU seconds of a forward and backward pass over the data, in batches of 256; the better of two."""
    found = []
    for _ in range(2):
        start = process_time()
        for some, targets in zip(x.split(256), y.split(256), strict=True):
            loss(model(some), targets).backward()
        found.append(process_time() - start)
    for p in model.parameters():
        p.grad = None
    return min(found)
