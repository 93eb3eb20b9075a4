"""The batch-normed network's record → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lapwing_studies.report import axes
from lapwing_studies.report.cells import mean, over_seeds, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.batchnorm import TUNINGS
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"trained weights": SAMPLED, "linear mode": GLM}
COLUMNS = {
    "noise": "noise_std",
    "NLL everywhere": "nll",
    "NLL on the data": "nll_data",
    "NLL in the gaps": "nll_gap",
    "epistemic std in the gaps": "gap_std",
}


def page(record: Record) -> StudyPage:
    run = record["runs"][0]
    bands = (
        Panel(f"band-{k}", f"Predictive band, evidence at the {run['rows'][k]['evidence']}.",
              partial(_band, run=run, row=run["rows"][k]), (5.0, 3.6))
        for k in (0, -1)
    )  # fmt: skip
    return StudyPage(
        title="What batch normalisation does to the evidence",
        lead=(
            f"A network 1-50-50-1 with BatchNorm ({run['weights']:,} weights), stopped early, on data with two gaps. "
            "The classic evidence looks at the trained weights, which are no mode of anything; the linear model's own "
            "mode is one.",
        ),
        figures=(
            Figure.of(
                "band",
                "The same network, tuned twice",
                "On the data both bands are narrow. Between them the classic evidence leaves everything possible.",
                bands,
                note="The band holds 95% of new points.",
                keys=(Key("data", "dot"), Key("truth", "dash muted"), Key("trained network", "line map")),
            ),
        ),
        tables=(scores(record),),
        notes=(
            "The same network and the same curvature in all rows: only the prior precision and the noise differ. The "
            "predictive mean is the network's own.",
            "The paper describes this effect on image networks; the one-dimensional example, and its limits, are ours.",
        ),
        settings={
            "network": f"1-50-50-1, BatchNorm, ReLU, no biases: {run['weights']:,} weights",
            "with the norms' scales and shifts": f"{run['parameters']:,} parameters",
            "data": f"{run['n_train']} training points, x − x²/10 + cos(πx/2) + 0.25 ε",
            "test": "points everywhere between −1 and 5, in the gaps as well",
            "posterior": "full GGN over all parameters",
        },
    )


def scores(record: Record) -> Table:
    rows = []
    for k, way in enumerate(TUNINGS):
        same = [run["rows"][k] for run in record["runs"]]
        rows.append((*way, _precisions(same), *(mean([r[key] for r in same], "{:.3f}") for key in COLUMNS.values())))
    return table(
        "batchnorm", "Three ways to tune one network",
        f"{over_seeds(record)} The geometric mean of the precision where there is one.",
        ("evidence at", "precisions", "prior precision", *COLUMNS), rows,
        "“normalised” is one precision for each normalised group of weights and one for the rest: the smallest and "
        "the largest are shown. A huge one means that the evidence switches its group off.",
    )  # fmt: skip


def _precisions(rows: list[Record]) -> Cell:
    found, typical = (
        [p for row in rows for p in row["precisions"]],
        np.exp(np.log([r["precision"] for r in rows]).mean()),
    )
    one = len(found) == len(rows)
    return Cell(f"{typical:.3g}" if one else f"{min(found):.1g} … {max(found):.1g}", float(typical))


def _band(ax: Axes, run: Record, row: Record) -> None:
    axes.band(ax, run, row, COLOURS[row["evidence"]], (-6.5, 9.5))
    ax.set_title(f"evidence at the {row['evidence']}", color=COLOURS[row["evidence"]])
    ax.set_title(f"NLL {row['nll']:.2f}", loc="right", color=MUTED, fontsize=10, fontweight="normal")
