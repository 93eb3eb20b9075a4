"""The record of table 2, images and images from elsewhere → tables, a figure and a page."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.claims import table_of
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, INK, MAP, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.immer_images import OUTSIDE, ImmerImagesRecord, chosen, claims, mean, methods
from lapwing_studies.reproduce.published import IMMER_2021_IMAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "ood_auc": "OOD-AUC"}


def page(record: ImmerImagesRecord, command: str) -> StudyPage:
    found, sets = claims(record), _sets(record)
    return StudyPage(
        title="Images, and images from elsewhere",
        lead=(
            "One Gaussian posterior of a trained network, sampled through the network or linearised, and "
            "a Gaussian process of the same kernel on a subset of the images.",
        ),
        headlines=tuple(Headline(claim.found, f"{claim.says}: {claim.verdict}") for claim in (*found[:2], found[3])),
        figures=tuple(_figure(record, data) for data in sets),
        tables=(
            table_of(found),
            *(_table(record, data, by) for data in sets for by in ("validation", "evidence")),
            *(_published(data) for data in sets),
        ),
        notes=(
            "A network is trained for every prior precision, and its posteriors have the same precision. OOD-AUC: does "
            "the entropy of the predictive tell test images from those of another set? Published rows are of larger "
            "networks and all images: compare orderings.",
        ),
        settings=(
            Setting(name="images", value=f"{record['n_train']:,} for training, {record['n_test']:,} for testing"),
            Setting(name="network", value=f"{record['runs'][0]['parameters']:,} parameters, {record['epochs']} epochs"),
            Setting(name="precisions", value=", ".join(f"{v:g}" for v in _precisions(record))),
            Setting(name="seeds", value=str(record["n_seeds"])),
            Setting(name="time", value=f"{sum(run['seconds'] for run in record['runs']) / 60:.0f} minutes"),
        ),
        command=command,
    )


def _sets(record: ImmerImagesRecord) -> list[str]:
    return list(dict.fromkeys(run["data"] for run in record["runs"]))


def _precisions(record: ImmerImagesRecord) -> list[float]:
    return sorted({run["precision"] for run in record["runs"]})


def _table(record: ImmerImagesRecord, data: str, by: str) -> Table:
    rows = []
    for method in methods(record):
        cells = []
        for key in SCORES:
            values = [float(score[key]) for score in chosen(record, data, method, by)]  # type: ignore[literal-required]
            error = f" ± {stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
            cells.append(Cell(f"{fmean(values):.3f}{error}", fmean(values)))
        rows.append((Cell(method, method), *cells))
    return Table(
        f"{data}-{by}",
        f"{data}, outside: {OUTSIDE[data]}; precision by {by}",
        "Mean ± standard error over seeds." if record["n_seeds"] > 1 else "One seed.",
        ("method", *SCORES.values()),
        tuple(rows),
    )


def _published(data: str) -> Table:
    rows = tuple(
        (Cell(method, method), *(Cell(f"{value:g} ± {error:g}", value) for value, error in scores))
        for method, scores in IMMER_2021_IMAGES[data].items()
    )
    columns = ("method", "accuracy %", "NLL", "ECE", "OOD-AUC")
    return Table(f"{data}-published", f"The published table, {data}", "Mean ± standard error.", columns, rows)


def _figure(record: ImmerImagesRecord, data: str) -> Figure:
    panels = tuple(
        panel(f"{data}-{key}", f"{words} by method.", partial(_paint, record=record, data=data, key=key))
        for key, words in SCORES.items()
    )
    return Figure(data, f"Every method on {data}", "The precision of the best validation NLL.", panels)


def _paint(ax: Axes, record: ImmerImagesRecord, data: str, key: str) -> None:
    names = methods(record)
    for row, method in enumerate(names):
        colour = {"MAP": MAP, "BNN": SAMPLED, "BNN dampened": SAMPLED}.get(method, INK if "GP" in method else GLM)
        ax.barh(row, mean(record, data, method, key), color=colour, height=0.65, alpha=0.85)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    if key in ("accuracy", "ood_auc"):
        ax.set_xlim(min(0.95 * min(mean(record, data, method, key) for method in names), 0.5), 1)
    ax.set_title(SCORES[key])


def picture(record: ImmerImagesRecord, path: Path) -> Path:
    data = _sets(record)[0]
    return write_picture([partial(_paint, record=record, data=data, key=k) for k in SCORES], path, shape=(16.0, 3.6))
