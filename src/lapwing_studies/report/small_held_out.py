"""The record of tuning with few held-out rows → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import mean, number, over_seeds, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, MAP, MUTED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.small_held_out import SIZES, losses
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_AXIS = 0.25  # limits of the axis in nats; values beyond are drawn at the edge


def page(record: Record) -> StudyPage:
    drawn = [Panel(f"rows-{n}", f"{n} held-out rows.", partial(_losses, record=record, n=n), (4.4, 5.6)) for n in SIZES]
    kinds = dict.fromkeys(run["network"] for run in record["runs"])
    return StudyPage(
        title="Tuning with few held-out rows",
        lead=(
            f"Networks on {len(grouped(record['runs'], 'data'))} UCI tables, tuned by "
            "lw.tune(posterior, data, validation=...) with 30, 100 and 300 held-out rows, against the network as it "
            "was trained and the network with a temperature (for numbers: a noise) from the same rows.",
            "The best of many candidates on few rows is best by luck. A choice that knows this changes little where "
            "the rows say little.",
        ),
        figures=(
            Figure.of(
                "losses",
                "Every run",
                f"Test NLL less the network's. Right of zero tuning lost; runs beyond ±{_AXIS:g} lie at the edge.",
                drawn,
                keys=(Key("gained or kept", "dot glm"), Key("lost", "dot map")),
            ),
        ),
        tables=(summary(record), by_table(record)),
        notes=(
            "Test NLL per row; numbers to predict are in standard deviations of the training targets. The noise of "
            "the plain network is estimated from its training residuals, as people do who hold nothing out.",
        ),
        settings={"networks": "MLP 30-30, by seed in turn: " + "; ".join(kinds)},
    )


def summary(record: Record) -> Table:
    rows = []
    for kind in ("classification", "regression"):
        for n in SIZES:
            by_set = losses(record, n, kind=kind)
            if not by_set:
                continue
            every = [value for values in by_set.values() for value in values]
            others = [value for values in losses(record, n, kind=kind, over="temperature").values() for value in values]
            means = {name: fmean(values) for name, values in by_set.items()}
            worst = max(means, key=means.__getitem__)
            moved = sum(row["moved"] for run in record["runs"] if run["kind"] == kind for row in run["rows"]
                        if row["n"] == n)  # fmt: skip
            rows.append((
                kind, number(n, "{}"), number(len(every), "{}"), mean(every, "{:+.3f}"), mean(others, "{:+.3f}"),
                Cell(f"{means[worst]:+.3f} {worst}", means[worst]), number(max(every), "{:+.3f}"), number(moved, "{}"),
            ))  # fmt: skip
    columns = (
        "kind", "held-out rows", "runs", "against the network", "against temperature", "worst table", "worst run",
        "mean moved",
    )  # fmt: skip
    return table(
        "summary", "Differences of test NLL", "Means over tables and seeds; below zero tuning gains.", columns, rows,
        "Worst table: the largest mean over seeds. Mean moved: runs in which the held-out rows moved the mean.",
    )  # fmt: skip


def by_table(record: Record) -> Table:
    found = [losses(record, n) for n in SIZES]
    rows = [
        (name, *(mean(some[name], "{:+.3f}") if name in some else number(None) for some in found))
        for name in grouped(record["runs"], "data")
    ]
    return table(
        "tables", "Test NLL against the network, by table", over_seeds(record),
        ("table", *(f"{n} rows" for n in SIZES)), rows,
        "No figure where so many rows would be more than 45 % of the table.",
    )  # fmt: skip


def _losses(ax: Axes, record: Record, n: int) -> None:
    names, by_set = list(grouped(record["runs"], "data")), losses(record, n)
    ax.axvline(0, color=MUTED, linewidth=1.2)
    for row, name in enumerate(names):
        found = by_set.get(name, [])
        ax.scatter(
            [min(max(v, -_AXIS), _AXIS) for v in found], [row] * len(found), s=18, alpha=0.7,
            color=[GLM if v <= 0 else MAP for v in found],
        )  # fmt: skip
    axes.rows(ax, [name.replace("_", " ") for name in names])
    ax.set(xlim=(-_AXIS * 1.05, _AXIS * 1.05), xlabel=f"NLL against the network, {n} rows")
