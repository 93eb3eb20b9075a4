"""Means over seeds or splits, their standard errors, and the records of one kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from lapwing_studies.reproduce.study import Record


def standard_error(values: Sequence[float]) -> float:
    """s / √n; zero for a single value, which shows none."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def mean_of(rows: Iterable[Record], key: str) -> float:
    return fmean(row[key] for row in rows)


def grouped(rows: Iterable[Record], *keys: str) -> dict[Any, list[Record]]:
    """Rows by the value of a key, or by those of several, in the order in which these occur."""
    found: dict[Any, list[Record]] = {}
    for row in rows:
        found.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return found


def where(rows: Iterable[Record], **wanted: Any) -> list[Record]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]
