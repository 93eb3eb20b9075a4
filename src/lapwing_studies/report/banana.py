"""The banana's record → maps, a table and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import INK, PAPER
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.banana import BananaRecord, BananaRun

WORDS = {
    "MAP": "MAP: p",
    "BNN": "sampled weights: p",
    "GLM": "GLM: p",
    "GLM aleatoric": "GLM: aleatoric",
    "GLM epistemic": "GLM: epistemic",
}


def page(record: BananaRecord, command: str) -> StudyPage:
    run = record["runs"][0]
    shallow, deep = run["rows"][0], run["rows"][-1]
    return StudyPage(
        title="The banana: where a classifier doubts",
        lead=(
            f"Tanh layers of 50 units on {run['n_train']:,} points in the plane ({run['source']}). One full Gaussian "
            "posterior, pushed through the linearised network and sampled through the network itself.",
        ),
        headlines=(
            Headline(
                f"{run['epistemic_far'] / run['epistemic_data']:.0f} times",
                "the epistemic variance far from the data, against its median on them (GLM)",
            ),
            Headline(
                f"{shallow['bnn_nll']:.2f} → {deep['bnn_nll']:.2f}",
                "test NLL of sampled weights, one → three layers",
            ),
            Headline(f"{shallow['glm_nll']:.2f} → {deep['glm_nll']:.2f}", "of the GLM"),
        ),
        figures=(figure(run),),
        tables=(table(run),),
        notes=("Variances are those of the label: p̄ − p̄² = Var p + E[p − p²], epistemic and aleatoric.",),
        settings=(
            Setting(name="precision", value="the best of four by validation NLL of the GLM"),
            Setting(name="training", value="full-batch Adam, 1,000 steps, rate 0.01 falling to zero"),
            Setting(name="posterior", value="full GGN; 300 draws of the weights for the maps"),
        ),
        command=command,
    )


def table(run: BananaRun) -> Table:
    rows = tuple(
        (
            Cell(str(row["depth"]), row["depth"]),
            Cell(f"{row['precision']:.3g}", row["precision"]),
            *(Cell(f"{row[key]:.3f}", row[key]) for key in ("map_nll", "bnn_nll", "glm_nll")),
        )
        for row in run["rows"]
    )
    return Table(
        "depth",
        "Test NLL by depth",
        "The precision is the one that suits the GLM. Chance is log 2 = 0.693.",
        ("hidden layers", "precision", "MAP", "BNN", "GLM"),
        rows,
    )


def figure(run: BananaRun) -> Figure:
    panels = tuple(
        panel(f"map-{k}", f"{WORDS[name]} on the plane.", partial(_map, run=run, name=name), shape=(3.4, 3.2))
        for k, name in enumerate(WORDS)
    )
    return Figure(
        "maps",
        "Probabilities and doubt",
        "Sampled weights wash the classes out. The linearised network is sure on the data, and unsure far away.",
        panels,
        "Two hidden layers. Probabilities from 0 (light) to 1 (dark), variances from 0 to 0.25; the line is p = ½.",
    )


def _map(ax: Axes, run: BananaRun, name: str) -> None:
    axis, values = np.asarray(run["axis"]), np.asarray(run["maps"][name])
    variance = name.startswith("GLM ")
    levels = np.linspace(0, 0.25 if variance else 1, 11)
    colours = "Greys" if variance else "PuOr"
    ax.contourf(axis, axis, values, levels=levels, cmap=colours, alpha=0.9, extend="max" if variance else "neither")
    ax.contour(
        axis, axis, np.asarray(run["maps"]["GLM" if variance else name]), levels=[0.5], colors=[INK], linewidths=1
    )
    points, labels = np.asarray(run["points"]), np.asarray(run["labels"])
    for label, face in ((0, PAPER), (1, INK)):
        some = points[labels == label]
        ax.plot(
            some[:, 0], some[:, 1], "o", color=INK, markerfacecolor=face, markersize=2, markeredgewidth=0.4, alpha=0.7
        )
    ax.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]))
    ax.set_aspect("equal")
    ax.grid(visible=False)
    ax.set_title(WORDS[name])


def picture(record: BananaRecord, path: Path) -> Path:
    run = record["runs"][0]
    return write_picture([partial(_map, run=run, name=name) for name in WORDS], path, shape=(16.0, 3.6))
