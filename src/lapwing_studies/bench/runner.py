"""Run every case in its own process, so that cases do not share memory, caches or threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from lapwing_studies.bench.case import CASES, Row, listed

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(workload: str | None = None, *, limit: float = 900.0) -> Iterator[Row]:
    """Rows as they are measured; a case that fails or exceeds its limit gives a row with a note."""
    for name, case in listed(workload):
        yield _row(name, case, limit)


def _row(workload: str, case: str, limit: float) -> Row:
    command = [sys.executable, "-m", "lapwing_studies.bench.case", workload, case]
    try:
        done = subprocess.run(
            command, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return failed(workload, case, f"stopped after {limit:g} s")
    if done.returncode:
        return failed(workload, case, f"cannot run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def failed(workload: str, case: str, note: str) -> Row:
    kind = CASES[case]
    return Row(
        workload=workload,
        case=case,
        what=kind.what,
        ratio=None,
        unit=kind.unit,
        goal=kind.goals[workload],
        peak_mib=None,
        goal_mib=kind.goal_mib,
        note=note,
    )


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """The old rows, with those measured again replaced."""
    rows = {(row["workload"], row["case"]): row for row in [*old, *new]}
    return [rows[pair] for pair in listed() if pair in rows]
