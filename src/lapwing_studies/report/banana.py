"""The banana's record → maps, a table and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from lapwing_studies.report.cells import number, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import INK, PAPER
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {
    "MAP": "MAP: p",
    "BNN": "sampled weights: p",
    "GLM": "GLM: p",
    "GLM aleatoric": "GLM: aleatoric",
    "GLM epistemic": "GLM: epistemic",
}


def page(record: Record) -> StudyPage:
    run = record["runs"][0]
    maps = (Panel(f"map-{k}", f"{WORDS[name]} on the plane.", partial(_map, run=run, name=name), (3.4, 3.4))
            for k, name in enumerate(WORDS))  # fmt: skip
    return StudyPage(
        title="The banana: where a classifier doubts",
        lead=(
            f"Tanh layers of 50 units on {run['n_train']:,} points in the plane ({run['source']}). One full Gaussian "
            "posterior, pushed through the linearised network and sampled through the network itself.",
        ),
        figures=(
            Figure.of(
                "maps",
                "Probabilities and doubt",
                "Sampled weights wash the classes out. The linearised network is sure on the data, and unsure far "
                "away.",
                maps,
                note="Two hidden layers. Probabilities from 0 (orange) to 1 (purple), variances from 0 to 0.25 (dark); "
                "the line is p = ½.",
            ),
        ),
        tables=(by_depth(run),),
        notes=(
            "Variances are those of the label: p̄ − p̄² = Var p + E[p − p²], epistemic and aleatoric.",
            "What differs from the paper, which shows pictures: part of the training points, full-batch training, and "
            "four precisions to choose from.",
        ),
        settings={
            "precision": "the best of four by validation NLL of the GLM",
            "training": "full-batch Adam, 1,000 steps, rate 0.01 falling to zero",
            "posterior": "full GGN; 300 draws of the weights for the maps",
        },
    )


def by_depth(run: Record) -> Table:
    rows = [
        (number(row["depth"], "{}"), number(row["precision"], "{:.3g}"),
         *(number(row[key]) for key in ("map_nll", "bnn_nll", "glm_nll")))
        for row in run["rows"]
    ]  # fmt: skip
    see = "The precision is the one that suits the GLM. Chance is log 2 = 0.693."
    return table("depth", "Test NLL by depth", see, ("hidden layers", "precision", "MAP", "BNN", "GLM"), rows)


def _map(ax: Axes, run: Record, name: str) -> None:
    axis, values = np.asarray(run["axis"]), np.asarray(run["maps"][name])
    variance = name.startswith("GLM ")
    levels = np.linspace(0, 0.25 if variance else 1, 11)
    colours = "Greys" if variance else "PuOr"
    ax.contourf(axis, axis, values, levels=levels, cmap=colours, alpha=0.9, extend="max" if variance else "neither")
    line = np.asarray(run["maps"]["GLM" if variance else name])
    ax.contour(axis, axis, line, levels=[0.5], colors=[INK], linewidths=1)
    points, labels = np.asarray(run["points"]), np.asarray(run["labels"])
    for label, face in ((0, PAPER), (1, INK)):
        x, y = points[labels == label].T
        ax.plot(x, y, "o", color=INK, markerfacecolor=face, markersize=2, markeredgewidth=0.4, alpha=0.7)
    ax.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]))
    ax.set_aspect("equal")
    ax.grid(visible=False)
    ax.set_title(WORDS[name])
