"""The record of a job as plain JSON values; None for what was not measured."""

from __future__ import annotations

from typing import TypedDict


class Phase(TypedDict):
    """CPU seconds, and peak memory of the phase above that after imports."""

    seconds: float
    peak_mib: float | None


class Method(TypedDict):
    """A method: NLL of the test rows per likelihood term, and CPU seconds in addition to training one network."""

    method: str
    nll: float | None
    seconds: float | None
    note: str


class Judged(TypedDict):
    what: str
    unit: str
    measured: float | None
    goal: float


class JobRecord(TypedDict):
    """`note`: why something is missing. `phases`: plan, fit, tune and predict, as far as they ran."""

    job: str
    what: str
    parameters: int | None
    rows: dict[str, int]
    train_seconds: float | None
    gradient_epoch_seconds: float | None
    forward_seconds: float | None
    phases: dict[str, Phase]
    fit_epochs: float | None
    tune_epochs: float | None
    predict_forwards: float | None
    peak_mib: float | None
    structure: str
    fisher: str
    why: str
    chosen: str
    planned: str
    methods: list[Method]
    goals: list[Judged]
    note: str


def blank(job: str, what: str, note: str = "") -> JobRecord:
    return JobRecord(
        job=job,
        what=what,
        parameters=None,
        rows={},
        train_seconds=None,
        gradient_epoch_seconds=None,
        forward_seconds=None,
        phases={},
        fit_epochs=None,
        tune_epochs=None,
        predict_forwards=None,
        peak_mib=None,
        structure="",
        fisher="",
        why="",
        chosen="",
        planned="",
        methods=[],
        goals=[],
        note=note,
    )
