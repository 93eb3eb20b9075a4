"""Time and memory of products with the GGN → a table, a figure and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lapwing_studies.report.cells import number, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, MAP, MUTED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = {"one_vector": ("one vector", MAP), "per_vector_of_eight": ("each of eight", GLM)}
PEAKS = {
    "one_vector_mib": ("peak, one", MAP),
    "eight_vectors_mib": ("peak, eight", GLM),
    "vector_mib": ("P numbers", MUTED),
}


def page(record: Record) -> StudyPage:
    drawn = [
        Panel("time", "Gradient passes of a product.", partial(_lines, record=record, what=TIMES), (5.0, 3.4)),
        Panel("memory", "Peak memory of a product.", partial(_lines, record=record, what=PEAKS), (5.0, 3.4)),
    ]
    return StudyPage(
        title="What a product costs",
        lead=(
            "Products with the whole Gauss–Newton matrix of a ResNet-18 of growing width, in gradient passes over the "
            "same images. No matrix is stored: memory grows with the parameters and the vectors, not their squares.",
        ),
        figures=(
            Figure.of(
                "cost",
                "Time and memory by the number of parameters",
                "Left: a product in gradient passes. Right: peak memory, and what one vector of P numbers takes.",
                drawn,
            ),
        ),
        tables=(costs(record),),
        notes=("Eight vectors share one run of the network, and go through it together.",),
        settings={"images": f"{record['side']} × {record['side']}, random", "time": "of one thread's processor"},
    )


def costs(record: Record) -> Table:
    rows = [
        (*(number(row[key], "{:,}") for key in ("width", "p", "n_images")), *(number(row[k], "{:.1f}") for k in TIMES),
         *(number(row[k], "{:,.0f}" if k != "vector_mib" else "{:.2g}") for k in PEAKS))
        for row in record["rows"]
    ]  # fmt: skip
    heads = [words for words, _ in (*TIMES.values(), *PEAKS.values())]
    return table(
        "cost", "Products with the whole GGN",
        "Time in gradient passes over the same images; memory in MiB above what the process held before.",
        ("width", "parameters", "images", *heads), rows, "Each row in a process of its own.",
    )  # fmt: skip


def _lines(ax: Axes, record: Record, what: dict[str, tuple[str, str]]) -> None:
    p = [row["p"] for row in record["rows"]]
    for key, (words, colour) in what.items():
        found = [float("nan") if row[key] is None else row[key] for row in record["rows"]]
        ax.plot(p, found, "o-", color=colour, label=words)
    ax.set(xscale="log", xlabel="parameters")
    if what is PEAKS:
        ax.set(yscale="log", ylabel="MiB")
    else:
        ax.set(ylabel="gradient passes", ylim=(0, None))
    ax.legend(frameon=False)
