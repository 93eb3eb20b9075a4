"""The record of table 2, images and images from elsewhere → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import best_of_columns, mean, over_seeds, published, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.immer_images import BNN, DAMPENED, OUTSIDE, chosen, methods
from lapwing_studies.reproduce.means import grouped, mean_of
from lapwing_studies.reproduce.means import standard_error as error_of
from lapwing_studies.reproduce.published import IMMER_2021_IMAGES
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "ood_auc": "OOD-AUC"}
SHOWN = dict(zip(SCORES, ("{:.1%}", "{:.3f}", "{:.3f}", "{:.3f}"), strict=True))


def page(record: Record) -> StudyPage:
    sets, runs = list(grouped(record["runs"], "data")), record["runs"]
    figures = tuple(_figure(record, data) for data in sets)
    return StudyPage(
        title="Images, and images from elsewhere",
        lead=(
            "One Gaussian posterior of a trained network, sampled through the network or linearised, and "
            "a Gaussian process of the same kernel on a subset of the images.",
        ),
        figures=figures,
        tables=tuple(scores(record, data, by) for data in sets for by in ("validation", "evidence")),
        notes=(
            "A network is trained for every prior precision, and its posteriors have the same precision. OOD-AUC: does "
            "the entropy of the predictive tell test images from those of another set?",
            "What differs from the paper: smaller networks and part of the images (the faithful tier has the paper's "
            "networks and all images), fewer epochs, validation images from the training set, and Gaussian processes "
            "of at most 800 points. Published rows are of 3,200 points. Compare orderings.",
        ),
        settings={
            "images": f"{record['n_train']:,} for training, {record['n_test']:,} for testing",
            "network": f"{runs[0]['parameters']:,} parameters, {record['epochs']} epochs",
            "precisions": ", ".join(f"{v:g}" for v in sorted({run["precision"] for run in runs})),
            "time": f"{sum(run['seconds'] for run in runs) / 60:.0f} minutes",
        },
        cover=tuple(figure.drawn for figure in figures),
    )


def scores(record: Record, data: str, by: str) -> Table:
    """Measured, and beside it published."""
    rows = []
    for method in methods(record):
        found = chosen(record, data, method, by)
        theirs = IMMER_2021_IMAGES[data].get("GP 3200" if method.startswith("GP") else method)
        cells = [Cell("–", 0.0)] * len(SCORES) if theirs is None else [published(*pair) for pair in theirs]
        rows.append([method, *(mean([s[key] for s in found], SHOWN[key]) for key in SCORES), *cells])
    return table(
        f"{data}-{by}", f"{data}, outside: {OUTSIDE[data]}; precision by {by}",
        f"{over_seeds(record)} The best of the measured in bold.",
        ("method", *SCORES.values(), *(f"published {words}" for words in SCORES.values())),
        best_of_columns(rows, {1: -1, 2: 1, 3: 1, 4: -1}),
        "Published accuracy in per cent; the Gaussian process of 3,200 points beside every number of points.",
    )  # fmt: skip


def _figure(record: Record, data: str) -> Figure:
    drawn = (
        Panel(f"{data}-{key}", f"{words} by method.", partial(_paint, record=record, data=data, key=key), (4.2, 3.6))
        for key, words in SCORES.items()
    )
    see = "The precision of the best validation NLL. A line is two standard errors each way."
    return Figure.of(data, f"Every method on {data}", see, drawn)


def _paint(ax: Axes, record: Record, data: str, key: str) -> None:
    names = methods(record)
    found = [chosen(record, data, method) for method in names]
    means, errors = [mean_of(some, key) for some in found], [2 * error_of([s[key] for s in some]) for some in found]
    colours = [{"MAP": MAP, BNN: SAMPLED, DAMPENED: SAMPLED}.get(m, INK if "GP" in m else GLM) for m in names]
    ax.barh(range(len(names)), means, color=colours, height=0.65, alpha=0.85, xerr=errors,
            error_kw={"ecolor": MUTED, "elinewidth": 1.4})  # fmt: skip
    axes.rows(ax, names)
    if key in ("accuracy", "ood_auc"):
        ax.set_xlim(min(0.95 * min(means), 0.5), 1)
    ax.set_title(f"{data}: {SCORES[key]}")
