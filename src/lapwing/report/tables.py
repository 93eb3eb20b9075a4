"""Records → tables: named columns and rows of numbers, printed the same way in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapwing.bench.records import DigitsRecord, RegressionRecord


@dataclass(frozen=True)
class Cell:
    """What is shown, what a table is sorted by, and whether it is the best of its column."""

    text: str
    sort: float | str
    mark: str = ""


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    see: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Column:
    """A heading, the record key under it, how to print it, and how far it is from ideal (`None`: it is not a score)."""

    heading: str
    key: str
    show: Callable[[Any], str]
    loss: Callable[[Any], float] | None = None


DIGITS = (
    Column("predictive", "method", str),
    Column("prior tuned by", "tuning", str),
    Column("prior precision", "precision", lambda v: "–" if v is None else f"{v:.3g}"),
    Column("accuracy ↑", "accuracy", "{:.1%}".format, lambda v: -v),
    Column("NLL ↓", "nll", "{:.3f}".format, float),
    Column("ECE ↓", "ece", "{:.3f}".format, float),
    Column("Brier ↓", "brier", "{:.3f}".format, float),
    Column("OOD-AUC ↑", "ood_auc", "{:.3f}".format, lambda v: -v),
)
REGRESSION = (
    Column("predictive", "method", str),
    Column("where", "where", str),
    Column("RMSE ↓", "rmse", "{:.3f}".format, float),
    Column("NLL ↓", "nll", "{:.3f}".format, float),
    Column("95% interval covers", "coverage", "{:.1%}".format, lambda v: abs(v - 0.95)),
    Column("interval width", "width", "{:.2f}".format),
)


def digits(record: DigitsRecord) -> Table:
    return Table(
        "digits",
        "Handwritten digits, every way of predicting",
        f"{record['n_test']} test digits; OOD-AUC asks whether the entropy tells them from the same digits "
        f"{record['shift']}. Bold is the best of its column. Bad rows are left in: they are part of the answer. "
        "Sampled-network rows depend on the weights drawn, their OOD-AUC most: at 200 draws its deviation over "
        "eight sets of draws was 0.06, that of the NLL 0.01."
        + "".join(f" Tuning by validation said: {notice}" for notice in record["evidence"]["notices"]),
        tuple(column.heading for column in DIGITS),
        _rows(DIGITS, record["rows"]),
    )


def regression(record: RegressionRecord) -> Table:
    where = list(dict.fromkeys(row["where"] for row in record["rows"]))
    groups = [_rows(REGRESSION, [row for row in record["rows"] if row["where"] == place]) for place in where]
    return Table(
        "regression",
        "The same band in numbers",
        f"Means over {record['n_curves']} random curves (the picture shows the first), on fresh points among the "
        "training data and inside the gap. A 95% interval should cover 95% of them; bold is the best in each place.",
        tuple(column.heading for column in REGRESSION),
        tuple(row for rows in groups for row in rows),
    )


def _rows(columns: Sequence[Column], records: Sequence[Any]) -> tuple[tuple[Cell, ...], ...]:
    best = {c.key: min(c.loss(r[c.key]) for r in records) for c in columns if c.loss}
    return tuple(tuple(_cell(column, record[column.key], best) for column in columns) for record in records)


def _cell(column: Column, value: Any, best: dict[str, float]) -> Cell:
    is_best = column.loss is not None and column.loss(value) == best[column.key]
    return Cell(column.show(value), -1.0 if value is None else value, "best" if is_best else "")
