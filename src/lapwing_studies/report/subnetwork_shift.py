"""The record of subnetworks under shift → curves, tables and a page."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report.cells import mean, over_seeds, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, OUTSIDE, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.means import grouped, where
from lapwing_studies.reproduce.means import standard_error as error_of
from lapwing_studies.reproduce.study import Record
from lapwing_studies.reproduce.subnetwork_shift import RANDOM, SUBNETWORK, by_level

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = {"error": "error", "ll": "log likelihood", "brier": "Brier score", "ece": "ECE"}
# Method → colour, marker, line.
LOOKS = {
    "MAP": (MAP, "o", "-"),
    "ensemble": (INK, "s", "-"),
    "dropout": (OUTSIDE, "^", "-"),
    "SWAG": (MUTED, "v", "--"),
    "diagonal": (SAMPLED, "D", "-"),
    SUBNETWORK: (GLM, "o", "-"),
    RANDOM: (GLM, "", "--"),
}
LEVELS = {"rotated": "rotation (degrees)", "corrupted": "severity"}


def page(record: Record) -> StudyPage:
    kinds = list(grouped(record["runs"], "kind"))
    figures = tuple(_figure(record, kind) for kind in kinds)
    return StudyPage(
        title="Few weights, large shifts",
        lead=("Images that drift away from the training data, and a full covariance over some of the weights.",),
        figures=figures,
        tables=tuple(scores(record, kind, key) for kind in kinds for key in SCORES),
        notes=(
            "Subnetworks are the weights that vary most along further training (SWAG), as in the paper; the diagonal "
            "posterior has all weights. Prior precisions are chosen by validation NLL.",
            "What differs from the paper, which has plots and no table: small networks in place of ResNet-18, part of "
            "the images, subnetworks of at most a thousand weights in place of 42,000, no VOGN, and corruptions of our "
            "own (noise, blur, contrast, brightness, occlusion) in place of CIFAR-10-C.",
        ),
        settings={
            "images": f"{record['n_train']:,} for training, {record['n_test']:,} for testing",
            "time": f"{sum(run['seconds'] for run in record['runs']) / 60:.0f} minutes",
        },
        cover=tuple(figure.drawn for figure in figures),
    )


def _methods(record: Record) -> list[str]:
    return list(dict.fromkeys(row["method"] for run in record["runs"] for row in run["rows"]))


def scores(record: Record, kind: str, key: str) -> Table:
    shown = [level for level in by_level(record, kind, "MAP", key) if kind == "corrupted" or level % 30 == 0]
    found = {method: by_level(record, kind, method, key) for method in _methods(record)}
    rows = [(method, *(mean(levels[level]) for level in shown)) for method, levels in found.items()]
    columns = ("method", *(f"{level}°" if kind == "rotated" else str(level) for level in shown))
    see = f"By {LEVELS[kind]}. {over_seeds(record, len(where(record['runs'], kind=kind)))}"
    return table(f"{kind}-{key}", f"{SCORES[key]}, {kind} images", see, columns, rows)


def _figure(record: Record, kind: str) -> Figure:
    drawn = (
        Panel(
            f"{kind}-{key}", f"{words}, {kind} images.", partial(_paint, record=record, kind=kind, key=key), (4.8, 4.0)
        )
        for key, words in SCORES.items()
    )
    k = record["sizes"][-1]
    see = f"Subnetworks of {k:,} weights; bands are standard errors over seeds. Fewer weights are in the tables."
    return Figure.of(kind, f"{kind.capitalize()} images", see, drawn)


def _paint(ax: Axes, record: Record, kind: str, key: str) -> None:
    for name, (colour, marker, line) in LOOKS.items():
        method = f"{name} {record['sizes'][-1]}" if name in (SUBNETWORK, RANDOM) else name
        found = by_level(record, kind, method, key)
        means, errors = [fmean(v) for v in found.values()], [error_of(v) for v in found.values()]
        wide = 2.6 if name == SUBNETWORK else 1.5
        ax.plot(list(found), means, color=colour, marker=marker, markersize=3.5, linestyle=line, linewidth=wide,
                label=method)  # fmt: skip
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        ax.fill_between(list(found), low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set(xlabel=LEVELS[kind], ylabel=SCORES[key])
    if kind == "rotated":
        ax.set_xticks(range(0, 181, 45))
    ax.set_title(f"{SCORES[key]}, {kind}")
    if key == "error":
        ax.legend(fontsize=8, frameon=False)
