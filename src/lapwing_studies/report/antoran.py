"""The record of the table of Antorán et al. (2022), scaled down → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import mean, over_seeds, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, MAP, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.antoran import WAYS, networks, values
from lapwing_studies.reproduce.published import ANTORAN_2022
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN = ("none (MAP)", "–")
COLOURS = {"linear mode": GLM, "trained weights": SAMPLED, "none (MAP)": MAP}
SCORES = {
    "nll": ("Test NLL", "Lower is better."),
    "ece": ("Calibration", "Expected calibration error, ten bins; lower is better."),
    "error": ("Error", "Share of wrong labels."),
    "precision": ("Prior precision", "Geometric mean over weights."),
}


def page(record: Record) -> StudyPage:
    first = record["runs"][0]
    sizes = {run["network"]: run["parameters"] for run in record["runs"]}
    rows = f"{first['n_train']:,} / {first['n_validation']:,} / {first['n_test']:,}"
    drawn = Panel("modes", "Test NLL of every network.", partial(_paint, record=record), (9.0, 3.8))
    found = [scores(record, key) for key in SCORES]
    return StudyPage(
        title="The evidence at the right mode",
        lead=(
            "Antorán et al. (2022) showed that the evidence of a linearised network must be evaluated at the linear "
            "model's own mode, not at the trained weights, and with a precision of its own for each normalised group.",
            f"Here on {first['data']}, {first['n_train']:,} training images and networks of about 46,000 parameters: a "
            "small copy, whose ordering can be compared with the published one, not its numbers.",
        ),
        figures=(
            Figure.of(
                "modes",
                "Evidence at the linear mode and at the trained weights",
                "Filled marks are single precisions, open ones multiple. Left is better; the scale is logarithmic.",
                (drawn,),
                keys=(
                    Key("trained network (MAP)", "dot map"),
                    Key("evidence at the linear mode", "dot glm"),
                    Key("evidence at the trained weights", "dot sampled"),
                ),
            ),
        ),
        tables=(found[0], published_table(record), *found[1:]),
        notes=(
            "What differs from the paper: fewer training images, smaller images, a Kronecker posterior over all "
            "parameters (norm scales and shifts included) instead of the exact one over weights, our own sizes and "
            "training of the networks, early stopping, the network's own output as predictive mean, and Lapwing's "
            "default link.",
            "“Multiple” means one precision per normalised group for networks with normalisation, one per layer for "
            "the others.",
        ),
        settings={
            "data": first["data"],
            "training / validation / test images": rows,
            **{name: f"{n:,} parameters" for name, n in sizes.items()},
            "training": "Adam, weight decay 1e-4, stopped early",
            "posterior": "Kronecker factors over all parameters",
        },
    )


def scores(record: Record, key: str) -> Table:
    title, see = SCORES[key]
    ways, shown = (WAYS, "{:.3g}") if key == "precision" else ((PLAIN, *WAYS), "{:.3f}")
    rows = [(*way, *(mean(values(record, name, way, key), shown) for name in networks(record))) for way in ways]
    return table(key, title, f"{over_seeds(record)} {see}", ("evidence at", "precisions", *networks(record)), rows)


def published_table(record: Record) -> Table:
    rows = [
        (p["evidence"], p["prior"], *(Cell(p["nll"][n], float(p["nll"][n].split()[0])) for n in networks(record)))
        for p in ANTORAN_2022
    ]
    return table(
        "published", "The published table",
        "Antorán et al. (2022), NLL; their U-Net is left out. Other data sizes and another structure: compare orders.",
        ("evidence at", "precisions", *networks(record)), rows,
    )  # fmt: skip


def _paint(ax: Axes, record: Record) -> None:
    for row, network in enumerate(networks(record)):
        for way in (PLAIN, *WAYS):
            found, place = values(record, network, way, "nll"), row + {"single": -0.1, "multiple": 0.1}.get(way[1], 0.0)
            colour = COLOURS[way[0]]
            ax.plot([min(found), max(found)], [place, place], color=colour, linewidth=1.4, alpha=0.6)
            face = "none" if way[1] == "multiple" else colour
            ax.plot(fmean(found), place, "o", color=colour, markerfacecolor=face, markersize=7)
    axes.rows(ax, networks(record))
    axes.log_x(ax)
    ax.set_xlabel("test NLL (nats); a bar spans the seeds")
