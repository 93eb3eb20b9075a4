"""Iterations by preconditioner → tables, a figure and a page."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import best, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, MUTED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.preconditioners import DEFAULT, PRECONDITIONERS, found
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def page(record: Record) -> StudyPage:
    trainings = list(grouped(record["rows"], "inputs"))
    drawn = [
        Panel(f"iterations-{k}", f"Iterations, pixels {inputs}.", partial(_bars, record=record, inputs=inputs),
              (5.5, 3.6))
        for k, inputs in enumerate(trainings)
    ]  # fmt: skip
    see = "Fewer is better; the default of a matrix-free posterior in colour. Each panel has its prior precision."
    return StudyPage(
        title="Which preconditioner",
        lead=(
            f"Iterations of conjugate gradients on the posterior precision of a CNN of {record['parameters']} "
            f"parameters, trained on {record['n_train']} digits, until a draw of it is known to {record['rtol']:g}.",
        ),
        figures=(Figure.of("iterations", "Iterations by preconditioner", see, drawn),),
        tables=tuple(iterations(record, inputs, k) for k, inputs in enumerate(trainings)),
        notes=(
            "On a trained network curvature is large in few directions that cross layers. Leading directions take "
            "those out. Kronecker factors, a diagonal and even the exact blocks of layers miss them. Blocks save "
            "iterations on the smooth network, under priors so weak that the bulk of the curvature matters.",
        ),
        settings={"error": f"{record['rtol']:g}, in the norm of the precision"},
    )


def iterations(record: Record, inputs: str, k: int) -> Table:
    rows = [
        (Cell(f"{prior:g}", prior), *best([_cell(counts[name]) for name in PRECONDITIONERS]))
        for prior, counts in found(record, inputs).items()
    ]
    return table(
        f"iterations-{k}", f"Iterations, pixels {inputs}", "The fewest of a row in bold.",
        ("prior precision", *PRECONDITIONERS), rows,
        "Leading directions: Nystrom has one rough product each, LowRank converged eigenpairs.",
    )  # fmt: skip


def _cell(count: int | None) -> Cell:
    return Cell("many", math.inf) if count is None else Cell(str(count), count)


def _bars(ax: Axes, record: Record, inputs: str) -> None:
    """Under the weakest prior, if there are very weak ones; else the middle one."""
    by_prior = found(record, inputs)
    prior = min(by_prior) if min(by_prior) < 0.1 else sorted(by_prior)[1]
    counts = by_prior[prior]
    most = max(count or 0 for count in counts.values())
    colours = [GLM if name == DEFAULT else MUTED for name in counts]
    axes.bars(ax, list(counts), [c or most for c in counts.values()], colours, [_cell(c).text for c in counts.values()])
    ax.set(xlabel="iterations", title=f"{inputs}, δ = {prior:g}")
