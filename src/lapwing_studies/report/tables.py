"""Tables with named columns, printed in the same way in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapwing_studies.bench.records import DigitsRecord, RegressionRecord


@dataclass(frozen=True)
class Cell:
    """The text, the sort key, and whether it is the best of its column."""

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
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A heading, its record key, the number format, and the distance from the ideal (None: not a score)."""

    heading: str
    key: str
    show: Callable[[Any], str]
    loss: Callable[[Any], float] | None = None


DIGITS = (
    Column("method", "method", str),
    Column("prior tuned by", "tuning", str),
    Column("prior precision", "precision", lambda v: "–" if v is None else f"{float(f'{v:.3g}'):,g}"),
    Column("accuracy ↑", "accuracy", "{:.1%}".format, lambda v: -v),
    Column("NLL ↓", "nll", "{:.3f}".format, float),
    Column("ECE ↓", "ece", "{:.3f}".format, float),
    Column("Brier ↓", "brier", "{:.3f}".format, float),
    Column("OOD-AUC photos ↑", "ood_auc_photos", "{:.3f}".format, lambda v: -v),
    Column("OOD-AUC turned ↑", "ood_auc_turned", "{:.3f}".format, lambda v: -v),
)
REGRESSION = (
    Column("method", "method", str),
    Column("where", "where", str),
    Column("RMSE ↓", "rmse", "{:.3f}".format, float),
    Column("NLL ↓", "nll", "{:.3f}".format, float),
    Column("95% interval covers", "coverage", "{:.1%}".format, lambda v: abs(v - 0.95)),
    Column("interval width", "width", "{:.2f}".format),
)


def digits(record: DigitsRecord) -> Table:
    turned = record["map_on_turned"]
    return Table(
        "digits",
        "Handwritten digits, every way of predicting",
        _price(record),
        tuple(column.heading for column in DIGITS),
        _rows(DIGITS, record["rows"]),
        f"OOD-AUC asks whether the entropy tells the {record['n_test']} test digits from as many patches of "
        "photographs, and from the same digits turned by 90°. Turned digits are the odd question: the plain network "
        f"calls {turned['share']:.0%} of them a {turned['label']}, {turned['confidence']:.0%} sure on average. Bold is "
        "the best of its column. Rows of the sampled network vary with the weights drawn."
        + "".join(f" Tuning by validation said: {notice}" for notice in record["evidence"]["notices"]),
    )


def _price(record: DigitsRecord) -> str:
    """A sentence on what the evidence's prior costs or gains in NLL, depending on the rows."""
    nll = {r["method"]: r["nll"] for r in record["rows"] if r["tuning"] in ("–", "evidence")}
    numbers = f"{nll['GLM']:.3f} against {nll['MAP']:.3f} for the plain network"
    if nll["GLM"] <= nll["MAP"]:
        return f"With the prior of the evidence the GLM has the better NLL, {numbers}."
    return (
        f"With the prior of the evidence the GLM has the worse NLL, {numbers}: for a classifier this sure of its "
        "answers the evidence picks too small a precision, and the GLM turns timid."
    )


def regression(record: RegressionRecord) -> Table:
    where = list(dict.fromkeys(row["where"] for row in record["rows"]))
    groups = [_rows(REGRESSION, [row for row in record["rows"] if row["where"] == place]) for place in where]
    return Table(
        "regression",
        "The same band in numbers",
        "A 95% interval should cover 95% of fresh points, among the training data and inside the gap.",
        tuple(column.heading for column in REGRESSION),
        tuple(row for rows in groups for row in rows),
        f"Means over {record['n_curves']} random curves; the picture shows the first. Bold is the best in each place.",
    )


def _rows(columns: Sequence[Column], records: Sequence[Any]) -> tuple[tuple[Cell, ...], ...]:
    best = {c.key: c.show(min((r[c.key] for r in records), key=c.loss)) for c in columns if c.loss}
    return tuple(tuple(_cell(column, record[column.key], best) for column in columns) for record in records)


def _cell(column: Column, value: Any, best: dict[str, str]) -> Cell:
    """Values that print the same are marked alike: a difference beyond the last digit is not significant."""
    text = column.show(value)
    return Cell(text, -1.0 if value is None else value, "best" if text == best.get(column.key) else "")
