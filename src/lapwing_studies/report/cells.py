"""Cells of the studies' tables: words, numbers, means with their standard errors, and the best of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.means import standard_error
from lapwing_studies.reproduce.study import Record

Row = Sequence[Any]  # of words and cells


def number(value: float | None, shown: str = "{:.3f}") -> Cell:
    """A dash where there is no number."""
    return Cell("–", -math.inf) if value is None else Cell(shown.format(value), value)


def mean(values: Sequence[float], shown: str = "{:.3f}") -> Cell:
    """The mean, with its standard error if there are several values; blank if there are none."""
    if not values:
        return Cell("", math.inf)
    error = f" ± {shown.format(standard_error(values)).lstrip('+')}" if len(values) > 1 else ""
    return Cell(shown.format(fmean(values)) + error, fmean(values))


def published(value: float, error: float) -> Cell:
    return Cell(f"{value:g} ± {error:g}", value)


def best(cells: Sequence[Cell], sign: float = 1.0) -> list[Cell]:
    """The cells, with the smallest number marked (sign −1: the largest), and those that print the same."""
    numbers = [cell for cell in cells if math.isfinite(float(cell.sort))]
    text = min(numbers, key=lambda cell: sign * float(cell.sort)).text.split(" ±")[0] if numbers else None
    return [replace(cell, mark="best") if cell.text.split(" ±")[0] == text else cell for cell in cells]


def best_of_columns(rows: Sequence[Row], signs: dict[int, float]) -> list[Row]:
    """The rows, with the best of some columns marked."""
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
    for k, sign in signs.items():
        columns[k] = best(columns[k], sign)
    return [list(row) for row in zip(*columns, strict=True)]


def table(name: str, title: str, see: str, columns: Sequence[str], rows: Iterable[Row], note: str = "") -> Table:
    """A table whose rows hold words and cells."""
    made = tuple(tuple(Cell(c, c) if isinstance(c, str) else c for c in row) for row in rows)
    return Table(name, title, see, tuple(columns), made, note)


def over_seeds(record: Record, n_seeds: int | None = None) -> str:
    n = record["n_seeds"] if n_seeds is None else n_seeds
    return f"Means over {n} seeds ± standard error." if n > 1 else "One seed."
