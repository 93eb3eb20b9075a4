"""Compare kinds of Fisher: exact columns, random combinations of them, and labels drawn from the model.

Networks with several classes, fitted with Kronecker factors and tuned with held-out data: the cost of a fit, and the
effect of sampling on the test NLL, on variances and on the evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce import scores
from lapwing_studies.reproduce.battery import BatteryJob
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.means import mean_of
from lapwing_studies.reproduce.study import Record, Study
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


def run(study: Study) -> Record:
    tasks = [task for task in listed(study.folder) if task.name in TASKS]
    jobs = [FisherJob(task, seed, study) for task in tasks for seed in study.seeds]
    return study.record("fisher", jobs)


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

    def run(self) -> Record:
        """`variances`: root mean squared log ratio of output variances to the exact ones. `evidence`: nats per datum
        above the exact one."""
        trained = BatteryJob(self.task, self.seed, self.study)
        model, parts = trained.network(), trained.parts
        train, held_out = (parts.train.x, parts.train.y), (parts.validation.x, parts.validation.y)
        epoch = _gradient_epoch(model, self.task.loss, *train)
        exact: lw.Posterior | None = None
        rows: list[Record] = []
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
            rows.append(Record(
                kind=kind, gradient_epochs=round(seconds / epoch, 2), nll=score["nll"],
                variances=float(ratio.square().mean().sqrt()), evidence=gained,
            ))  # fmt: skip
        return Record(
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


def by_kind(record: Record) -> dict[str, list[Record]]:
    kinds = [row["kind"] for row in record["runs"][0]["rows"]]
    return {kind: [row for run in record["runs"] for row in run["rows"] if row["kind"] == kind] for kind in kinds}


def differences(record: Record, kind: str) -> list[float]:
    """Test NLL after tuning minus that of exact curvature, by task and seed."""
    rows = by_kind(record)
    return [row["nll"] - exact["nll"] for row, exact in zip(rows[kind], rows["exact"], strict=True)]


def claims(record: Record) -> list[Claim]:
    rows, worst = by_kind(record), max(map(abs, differences(record, "1 sketch")))
    sketch, label = (mean_of(rows[kind], "variances") for kind in ("1 sketch", "1 label"))
    faster = [exact["gradient_epochs"] / one["gradient_epochs"]
              for exact, one in zip(rows["exact"], rows["1 sketch"], strict=True)]  # fmt: skip
    return [
        Claim("one sketch of the output Hessian per datum is as good as the exact curvature", "tuned NLL within 0.005",
              f"differs by at most {worst:.4f} nats", worst <= 0.005),
        Claim("a sketch has less variance than a drawn label", "less",
              f"{sketch:.3f} in log variances, root mean square; {label:.3f} for labels", sketch < label),
        Claim("and its fit costs less than the exact one's", "less", f"{min(faster):.1f} to {max(faster):.1f} times",
              min(faster) > 1),
    ]  # fmt: skip
