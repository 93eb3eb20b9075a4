"""Run one job in this process: python -m lapwing_studies.bench.jobs NAME --data DIR --limit 300 --alone

Prints the record as one line of JSON; with --every one line after each phase, of which the last is complete.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

from lapwing_studies.bench.jobs.measuring import Setting, run
from lapwing_studies.bench.jobs.training import Shelf
from lapwing_studies.bench.jobs.workloads import JOBS, found
from lapwing_studies.reproduce.folder import DataFolder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lapwing_studies.bench.jobs", description="Measure one whole job.")
    parser.add_argument("job", choices=list(JOBS))
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--limit", type=float, default=900.0, help="CPU seconds")
    parser.add_argument("--weights", type=Path, help="folder where trained networks are kept")
    parser.add_argument("--alone", action="store_true", help="Lapwing alone, without the other methods")
    parser.add_argument("--every", action="store_true", help="print the record after every phase as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(DataFolder(asked.data), asked.limit, not asked.alone, Shelf(asked.weights))
    record = run(found(asked.job), setting, _tell if asked.every else _silent)
    _tell(record)


def _tell(record: Any) -> None:
    print(json.dumps(_finite(record), allow_nan=False), flush=True)


def _silent(record: Any) -> None:
    pass


def _finite(value: Any) -> Any:
    """NaN and infinity become None, as JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
