"""The record of the tutorial's pictures → figures, a table and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLOURS = {
    "exact": INK, "truth": MUTED, "Laplace": GLM, "probit": SAMPLED, "MAP": MAP, "network": MAP, "linearised": GLM,
    "sampled": SAMPLED, "with LayerNorm": GLM, "without": MAP, "linear mode": GLM, "trained weights": MAP,
}  # fmt: skip
TITLES = {
    "density": ("A skewed density", "density", "The Gaussian sits at the mode, and the mean is far to the right."),
    "logistic": ("Logistic regression", "p(y = 1 | x)", "The network alone is certain far from the data."),
    "network": (
        "Why linearise",
        "y",
        "The same posterior, linearised and by sampled weights: two standard deviations.",
    ),
    "scale": ("No minimum", "loss + penalty", "In front of a norm the loss is flat, and the penalty pulls to zero."),
    "mode": ("The right mode", "log evidence", "A mark shows where each curve is highest."),
}
DASHED = ("truth", "probit")
SPANS = {"network": (-3.5, 3.5), "scale": (0, 300)}


def page(record: Record) -> StudyPage:
    figures = tuple(_figure(run) for run in record["runs"])
    return StudyPage(
        title="The Laplace approximation in pictures",
        lead=("The pictures of a tutorial on the Laplace approximation, each of them computed.",),
        figures=figures,
        tables=(),
        notes=(
            "Exact values are by quadrature: 200,001 points on the line, 160 × 160 Gauss–Hermite nodes in the plane.",
        ),
        settings={
            "network": "1-6-1 tanh on 41 points of a sine, noise 0.1; precisions by MacKay's rule",
            "normalised networks": "1-10-10-1 tanh, LayerNorm, 400 steps of Adam",
        },
        cover=(tuple(panel for figure in figures for panel in figure.drawn),),
    )


def _figure(run: Record) -> Figure:
    title, _, see = TITLES[run["name"]]
    return Figure.of(run["name"], title, see, (Panel(run["name"], title, partial(paint, run=run), (5.2, 3.6)),))


def paint(ax: Axes, run: Record) -> None:
    title, label, _ = TITLES[run["name"]]
    for name, values in run["curves"].items():
        base = name.rstrip(" −+")
        if name.endswith("−"):
            ax.fill_between(
                run["x"], values, run["curves"][f"{base} +"], color=COLOURS[base], alpha=0.25, linewidth=0, label=base
            )
        elif not name.endswith("+"):
            ax.plot(run["x"], values, color=COLOURS[base], label=base, linestyle="--" if base in DASHED else "-")
            if run["name"] == "mode":
                best = max(range(len(values)), key=values.__getitem__)
                ax.plot(run["x"][best], values[best], "o", color=COLOURS[base])
    if run["name"] == "mode":
        most = max(map(max, run["curves"].values()))
        ax.set_ylim(most - 120, most + 10)
    ax.set(xlabel=run["x_label"], ylabel=label, xlim=(run["x"][0], run["x"][-1]))
    if run["name"] in SPANS:
        ax.set_ylim(*SPANS[run["name"]])
    ax.set_title(title)
    ax.legend(frameon=False, fontsize=9)
