"""Exact and sampled curvature → two tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, MAP
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.fisher import FisherRecord, KindRow


def page(record: FisherRecord, command: str) -> StudyPage:
    one = _rows(record)["1 sketch"]
    return StudyPage(
        title="Exact or sampled curvature",
        lead=(
            "The generalised Gauss–Newton matrix takes a backward pass for every class. A sketch takes one: a random "
            "combination of the columns, without bias. What is saved, and what is lost?",
        ),
        headlines=(
            Headline(f"{_mean(one, 'gradient_epochs'):.1f}", "gradient epochs of a fit with one sketch of every datum"),
            Headline(f"{_mean(_rows(record)['exact'], 'gradient_epochs'):.1f}", "with exact columns"),
            Headline(f"{_lost(record, '1 sketch'):+.4f}", "nats of test NLL after tuning, on average"),
        ),
        figures=(_figure(record),),
        tables=(by_kind(record), by_task(record)),
        notes=("Variances and evidence are compared under one prior; the NLL is that of each tuned posterior.",),
        settings=(
            Setting(name="seeds", value=str(record["n_seeds"])),
            Setting(name="structure", value="Kronecker factors"),
            Setting(name="effort", value=record["effort"]),
        ),
        command=command,
    )


def by_kind(record: FisherRecord) -> Table:
    rows = [
        (
            Cell(kind, kind),
            _number(_mean(found, "gradient_epochs"), "{:.1f}"),
            _number(_lost(record, kind), "{:+.4f}"),
            _number(max(map(abs, _differences(record, kind))), "{:.4f}"),
            _number(_mean(found, "variances"), "{:.3f}"),
            _number(_mean(found, "evidence"), "{:+.4f}"),
        )
        for kind, found in _rows(record).items()
    ]
    columns = ("curvature", "fit", "test NLL − exact", "largest difference", "log variances", "evidence per datum")
    return Table(
        "kinds",
        "What the kind of curvature costs, and what it changes",
        "The fit in gradient epochs; NLL in nats per test datum after tuning with held-out data; root mean squared "
        "difference of log output variances and difference of evidence in nats per datum, under one prior.",
        columns,
        tuple(rows),
        "Means over tasks and seeds.",
    )


def by_task(record: FisherRecord) -> Table:
    kinds, rows = list(_rows(record)), []
    for task in dict.fromkeys(run["task"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["task"] == task]
        nll = [mean(row["nll"] for run in runs for row in run["rows"] if row["kind"] == kind) for kind in kinds]
        words = (Cell(task, task), Cell(runs[0]["network"], runs[0]["network"]))
        rows.append((*words, *(_number(value, "{:.4f}") for value in nll)))
    return Table("tasks", "Test NLL after tuning", "Nats per datum.", ("task", "network", *kinds), tuple(rows))


def picture(record: FisherRecord, path: Path) -> Path:
    return write_picture([partial(_cost, record=record), partial(_loss, record=record)], path, shape=(11.0, 3.6))


def _rows(record: FisherRecord) -> dict[str, list[KindRow]]:
    kinds = [row["kind"] for row in record["runs"][0]["rows"]]
    return {kind: [row for run in record["runs"] for row in run["rows"] if row["kind"] == kind] for kind in kinds}


def _differences(record: FisherRecord, kind: str) -> list[float]:
    pairs = zip(_rows(record)[kind], _rows(record)["exact"], strict=True)
    return [row["nll"] - exact["nll"] for row, exact in pairs]


def _lost(record: FisherRecord, kind: str) -> float:
    return mean(_differences(record, kind))


def _mean(rows: list[KindRow], key: str) -> float:
    return mean(row[key] for row in rows)  # type: ignore[literal-required]


def _number(value: float, shown: str) -> Cell:
    return Cell(shown.format(value), value)


def _figure(record: FisherRecord) -> Figure:
    return Figure(
        "fisher",
        "Cost of a fit, and what sampling loses",
        "Left: gradient epochs by task. Right: test NLL after tuning against that of exact curvature.",
        (
            panel("cost", "Gradient epochs of a fit.", partial(_cost, record=record), shape=(5.0, 3.4)),
            panel("loss", "Test NLL minus that of exact curvature.", partial(_loss, record=record), shape=(5.0, 3.4)),
        ),
    )


def _cost(ax: Axes, record: FisherRecord) -> None:
    rows = _rows(record)
    for k, found in enumerate(rows.values()):
        ax.plot([k] * len(found), [row["gradient_epochs"] for row in found], "o", color=GLM, alpha=0.6)
    ax.set(yscale="log", ylabel="gradient epochs of a fit", xticks=range(len(rows)), xticklabels=list(rows))


def _loss(ax: Axes, record: FisherRecord) -> None:
    rows = _rows(record)
    for k, kind in enumerate(rows):
        differences = _differences(record, kind)
        ax.plot([k] * len(differences), differences, "o", color=MAP, alpha=0.6)
    ax.axhline(0, color="0.7", lw=0.8)
    ax.set(ylabel="test NLL − exact, nats", xticks=range(len(rows)), xticklabels=list(rows))
