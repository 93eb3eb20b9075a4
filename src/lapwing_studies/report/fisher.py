"""Exact and sampled curvature → two tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report.cells import mean, number, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, MAP
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.fisher import by_kind, differences
from lapwing_studies.reproduce.means import grouped, mean_of
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def page(record: Record) -> StudyPage:
    cost = Panel("cost", "Gradient epochs of a fit.", partial(_cost, record=record), (5.0, 3.4))
    loss = Panel("loss", "Test NLL minus that of exact curvature.", partial(_loss, record=record), (5.0, 3.4))
    return StudyPage(
        title="Exact or sampled curvature",
        lead=(
            "The generalised Gauss–Newton matrix takes a backward pass for every class. A sketch takes one: a random "
            "combination of the columns, without bias. What is saved, and what is lost?",
        ),
        figures=(
            Figure.of(
                "fisher",
                "Cost of a fit, and what sampling loses",
                "Left: gradient epochs by task. Right: test NLL after tuning against that of exact curvature.",
                (cost, loss),
            ),
        ),
        tables=(kinds(record), by_task(record)),
        notes=("Variances and evidence are compared under one prior; the NLL is that of each tuned posterior.",),
        settings={"structure": "Kronecker factors"},
    )


def kinds(record: Record) -> Table:
    rows = [
        (kind, number(mean_of(found, "gradient_epochs"), "{:.1f}"), mean(differences(record, kind), "{:+.4f}"),
         number(max(map(abs, differences(record, kind))), "{:.4f}"), number(mean_of(found, "variances")),
         number(mean_of(found, "evidence"), "{:+.4f}"))
        for kind, found in by_kind(record).items()
    ]  # fmt: skip
    return table(
        "kinds", "What the kind of curvature costs, and what it changes",
        "The fit in gradient epochs; NLL in nats per test datum after tuning with held-out data; root mean squared "
        "difference of log output variances and difference of evidence in nats per datum, under one prior.",
        ("curvature", "fit", "test NLL − exact", "largest difference", "log variances", "evidence per datum"), rows,
        "Means over tasks and seeds.",
    )  # fmt: skip


def by_task(record: Record) -> Table:
    names = list(by_kind(record))
    rows = []
    for task, runs in grouped(record["runs"], "task").items():
        nll = [fmean(row["nll"] for run in runs for row in run["rows"] if row["kind"] == kind) for kind in names]
        rows.append((task, runs[0]["network"], *(number(value, "{:.4f}") for value in nll)))
    return table("tasks", "Test NLL after tuning", "Nats per datum.", ("task", "network", *names), rows)


def _cost(ax: Axes, record: Record) -> None:
    rows = by_kind(record)
    for k, found in enumerate(rows.values()):
        ax.plot([k] * len(found), [row["gradient_epochs"] for row in found], "o", color=GLM, alpha=0.6)
    ax.set(yscale="log", ylabel="gradient epochs of a fit", xticks=range(len(rows)), xticklabels=list(rows))
    ax.yaxis.set_major_formatter("{x:g}")


def _loss(ax: Axes, record: Record) -> None:
    names = list(by_kind(record))
    for k, kind in enumerate(names):
        found = differences(record, kind)
        ax.plot([k] * len(found), found, "o", color=MAP, alpha=0.6)
    ax.axhline(0, color="0.7", lw=0.8)
    ax.set(ylabel="test NLL − exact, nats", xticks=range(len(names)), xticklabels=names)
