"""Iterations by preconditioner → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, MUTED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.preconditioners import Iterations, PreconditionerRecord

DRAWN = 1.0  # the prior precision of the headlines
DEFAULT = "Nystrom(64)"


def page(record: PreconditionerRecord, command: str) -> StudyPage:
    first = _inputs(record)[0]
    return StudyPage(
        title="Which preconditioner",
        lead=(
            f"Iterations of conjugate gradients on the posterior precision of a CNN of {record['parameters']} "
            f"parameters, trained on {record['n_train']} digits, until a draw of it is known to {record['rtol']:g}.",
        ),
        headlines=tuple(
            Headline(_shown(_find(record, first, name, DRAWN)), f"iterations, {name}")
            for name in ("none", "Kron()", DEFAULT)
        ),
        figures=(_figure(record),),
        tables=tuple(table(record, inputs) for inputs in _inputs(record)),
        notes=(
            "On a trained network curvature is large in few directions that cross layers. Leading directions take "
            "those out. Kronecker factors, a diagonal and even the exact blocks of layers miss them. Blocks save "
            "iterations on the smooth network, under priors so weak that the bulk of the curvature matters.",
        ),
        settings=(
            Setting(name="error", value=f"{record['rtol']:g}, in the norm of the precision"),
            Setting(name="effort", value=record["effort"]),
        ),
        command=command,
    )


def table(record: PreconditionerRecord, inputs: str) -> Table:
    names, precisions = _names(record), _precisions(record, inputs)
    rows = []
    for precision in precisions:
        found = [_find(record, inputs, name, precision) for name in names]
        best = min(row["iterations"] or 10**9 for row in found)
        cells = [Cell(_shown(r), r["iterations"] or 10**9, "best" if r["iterations"] == best else "") for r in found]
        rows.append((Cell(f"{precision:g}", precision), *cells))
    return Table(
        f"iterations-{_inputs(record).index(inputs)}",
        f"Iterations, pixels {inputs}",
        "The fewest of a row in bold.",
        ("prior precision", *names),
        tuple(rows),
        "Leading directions: Nystrom has one rough product each, LowRank converged eigenpairs.",
    )


def picture(record: PreconditionerRecord, path: Path) -> Path:
    paints = [partial(_bars, record=record, inputs=inputs) for inputs in _inputs(record)]
    return write_picture(paints, path, shape=(5.5 * len(paints), 3.6))


def _figure(record: PreconditionerRecord) -> Figure:
    panels = [
        panel(f"iterations-{k}", f"Iterations, pixels {inputs}.", partial(_bars, record=record, inputs=inputs))
        for k, inputs in enumerate(_inputs(record))
    ]
    see = "Fewer is better; the default of a matrix-free posterior in colour. Each panel has its prior precision."
    return Figure("iterations", "Iterations by preconditioner", see, tuple(panels))


def _bars(ax: Axes, record: PreconditionerRecord, inputs: str) -> None:
    names = _names(record)[::-1]
    drawn = _drawn(record, inputs)
    found = [_find(record, inputs, name, drawn) for name in names]
    most = max(row["iterations"] or 0 for row in found)
    values = [row["iterations"] or most for row in found]
    ax.barh(names, values, color=[GLM if name == DEFAULT else MUTED for name in names], height=0.65)
    for k, row in enumerate(found):
        ax.text(values[k], k, f" {_shown(row)}", va="center")
    ax.set(xlabel="iterations", xlim=(0, 1.15 * max(values)), title=f"{inputs}, δ = {drawn:g}")


def _find(record: PreconditionerRecord, inputs: str, name: str, precision: float) -> Iterations:
    key = inputs, name, precision
    return next(r for r in record["rows"] if (r["inputs"], r["preconditioner"], r["precision"]) == key)


def _precisions(record: PreconditionerRecord, inputs: str) -> list[float]:
    return sorted({row["precision"] for row in record["rows"] if row["inputs"] == inputs}, reverse=True)


def _drawn(record: PreconditionerRecord, inputs: str) -> float:
    """The prior precision of a panel: the weakest, if there are very weak ones."""
    weakest = _precisions(record, inputs)[-1]
    return weakest if weakest < 0.1 else DRAWN


def _shown(row: Iterations) -> str:
    return "many" if row["iterations"] is None else str(row["iterations"])


def _names(record: PreconditionerRecord) -> list[str]:
    return list(dict.fromkeys(row["preconditioner"] for row in record["rows"]))


def _inputs(record: PreconditionerRecord) -> list[str]:
    return list(dict.fromkeys(row["inputs"] for row in record["rows"]))
