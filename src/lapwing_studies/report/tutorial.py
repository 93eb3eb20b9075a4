"""The record of the tutorial's pictures → figures, a table and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.claims import table_of
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.tutorial import TutorialRecord, claims

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.tutorial_networks import Panel

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
SPANS = {"network": (-3.5, 3.5), "scale": (0, 300)}


def page(record: TutorialRecord, command: str) -> StudyPage:
    found = claims(record)
    return StudyPage(
        title="The Laplace approximation in pictures",
        lead=("The pictures of a tutorial on the Laplace approximation, each of them computed.",),
        headlines=tuple(
            Headline(claim.found, f"{claim.says}: {claim.verdict}") for claim in (found[0], found[3], found[7])
        ),
        figures=tuple(_figure(run) for run in record["runs"]),
        tables=(table_of(found),),
        notes=(
            "Exact values are by quadrature: 200,001 points on the line, 160 × 160 Gauss–Hermite nodes in the plane.",
        ),
        settings=(
            Setting(name="network", value="1-6-1 tanh on 41 points of a sine, noise 0.1; precisions by MacKay's rule"),
            Setting(name="normalised networks", value="1-10-10-1 tanh, LayerNorm, 400 steps of Adam"),
        ),
        command=command,
    )


def _figure(run: Panel) -> Figure:
    title, _, see = TITLES[run["name"]]
    names = dict.fromkeys(name.rstrip(" −+") for name in run["curves"])
    return Figure(
        run["name"],
        title,
        see,
        (panel(run["name"], title, partial(paint, run=run), shape=(5.6, 3.4)),),
        ", ".join(names),
        tuple(Key(name, f"line {_look(name)}") for name in names),
    )


def _look(name: str) -> str:
    return {GLM: "glm", MAP: "map", SAMPLED: "sampled"}.get(COLOURS[name], "")


def paint(ax: Axes, run: Panel) -> None:
    title, label, _ = TITLES[run["name"]]
    for name, values in run["curves"].items():
        base = name.rstrip(" −+")
        if name.endswith("−"):
            ax.fill_between(run["x"], values, run["curves"][f"{base} +"], color=COLOURS[base], alpha=0.25, linewidth=0)
        elif not name.endswith("+"):
            ax.plot(run["x"], values, color=COLOURS[base], linestyle="--" if base in ("truth", "probit") else "-")
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


def picture(record: TutorialRecord, path: Path) -> Path:
    return write_picture([partial(paint, run=run) for run in record["runs"]], path, shape=(20.0, 3.6))
