"""Run every job in its own process; failures become records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lapwing_studies.bench.jobs.records import JobRecord, blank
from lapwing_studies.bench.jobs.workloads import JOBS, Job, found
from lapwing_studies.bench.runner import ONE_THREAD

GRACE = 10  # wall seconds for each CPU second of the limit, training of the other methods included


def run(only: str | None = None, *, data: Path | None = None, limit: float = 900.0) -> Iterator[JobRecord]:
    """Records as they are measured, of all jobs or of one."""
    for job in JOBS.values() if only is None else [found(only)]:
        yield _record(job, data, limit)


def _record(job: Job, data: Path | None, limit: float) -> JobRecord:
    command = [sys.executable, "-m", "lapwing_studies.bench.jobs", job.name, "--every", "--limit", f"{limit:g}"]
    if data is not None:
        command += ["--data", str(data)]
    environment = {**os.environ, **ONE_THREAD}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            told, said = process.communicate(timeout=GRACE * limit)
            ended = _words(process.returncode, said)
        except subprocess.TimeoutExpired:
            process.kill()
            told, _ = process.communicate()
            ended = f"not finished after {GRACE * limit:g} s on the clock"
    return _last(job, told, ended)


def _last(job: Job, told: str, ended: str) -> JobRecord:
    """The last record that the process printed; after a crash it has the phases so far, and a note."""
    lines = [line for line in told.splitlines() if line.startswith("{")]
    record: Any = json.loads(lines[-1]) if lines else blank(job.name, job.described)
    record["note"] = "; ".join(part for part in (record["note"], ended) if part)
    return record


def _words(code: int, said: str) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"cannot run: {(said.strip().splitlines() or ['no message'])[-1]}" if code else ""


def merged(old: list[JobRecord], new: list[JobRecord]) -> list[JobRecord]:
    """Old records, with those measured again replaced, in the order of the jobs."""
    records = {record["job"]: record for record in [*old, *new]}
    return [records[name] for name in JOBS if name in records]
