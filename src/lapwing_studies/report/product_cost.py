"""Time and memory of products with the GGN → a table, a figure and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, MAP, MUTED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.bench.product_cost import ProductCost
    from lapwing_studies.reproduce.product_cost import CostRecord


def page(record: CostRecord, command: str) -> StudyPage:
    last = record["rows"][-1]
    return StudyPage(
        title="What a product costs",
        lead=(
            "Products with the whole Gauss–Newton matrix of a ResNet-18 of growing width, in gradient passes over the "
            "same images. No matrix is stored: memory grows with the parameters and the vectors, not their squares.",
        ),
        headlines=(
            Headline(f"{last['p']:,}", "parameters at the end"),
            Headline(f"{last['per_vector_of_eight']:.1f}", "gradient passes for each of eight vectors there"),
            Headline(_mib(last["eight_vectors_mib"]), "MiB at the peak of that product"),
        ),
        figures=(_figure(record),),
        tables=(table(record),),
        notes=("Eight vectors share one run of the network, and go through it together.",),
        settings=(
            Setting(name="images", value=f"{record['side']} × {record['side']}, random"),
            Setting(name="time", value="of one thread's processor"),
            Setting(name="effort", value=record["effort"]),
        ),
        command=command,
    )


def table(record: CostRecord) -> Table:
    counts, times = ("width", "parameters", "images"), ("one vector", "each of eight")
    return Table(
        "cost",
        "Products with the whole GGN",
        "Time in gradient passes over the same images; memory in MiB above what the process held before.",
        (*counts, *times, "peak, one", "peak, eight", "P numbers"),
        tuple(_cells(row) for row in record["rows"]),
        "Each row in a process of its own.",
    )


def picture(record: CostRecord, path: Path) -> Path:
    return write_picture([partial(_time, record=record), partial(_memory, record=record)], path, shape=(11.0, 3.6))


def _cells(row: ProductCost) -> tuple[Cell, ...]:
    counts = [Cell(f"{row[key]:,}", row[key]) for key in ("width", "p", "n_images")]
    times = [Cell(f"{row[key]:.1f}", row[key]) for key in ("one_vector", "per_vector_of_eight")]
    peaks = [Cell(_mib(value), value or 0.0) for value in (row["one_vector_mib"], row["eight_vectors_mib"])]
    return (*counts, *times, *peaks, Cell(f"{row['vector_mib']:.2g}", row["vector_mib"]))


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _figure(record: CostRecord) -> Figure:
    return Figure(
        "cost",
        "Time and memory by the number of parameters",
        "Left: a product in gradient passes. Right: peak memory, and what one vector of P numbers takes.",
        (
            panel("time", "Gradient passes of a product.", partial(_time, record=record), shape=(5.0, 3.4)),
            panel("memory", "Peak memory of a product.", partial(_memory, record=record), shape=(5.0, 3.4)),
        ),
    )


def _time(ax: Axes, record: CostRecord) -> None:
    p = [row["p"] for row in record["rows"]]
    ax.plot(p, [row["one_vector"] for row in record["rows"]], "o-", color=MAP, label="one vector")
    ax.plot(p, [row["per_vector_of_eight"] for row in record["rows"]], "o-", color=GLM, label="each of eight")
    ax.set(xscale="log", xlabel="parameters", ylabel="gradient passes", ylim=(0, None))
    ax.legend(frameon=False)


def _memory(ax: Axes, record: CostRecord) -> None:
    p = [row["p"] for row in record["rows"]]
    for key, colour, words in (
        ("one_vector_mib", MAP, "peak, one vector"),
        ("eight_vectors_mib", GLM, "peak, eight vectors"),
        ("vector_mib", MUTED, "one vector of P numbers"),
    ):
        ax.plot(p, [row[key] or float("nan") for row in record["rows"]], "o-", color=colour, label=words)  # type: ignore[literal-required]
    ax.set(xscale="log", yscale="log", xlabel="parameters", ylabel="MiB")
    ax.legend(frameon=False)
