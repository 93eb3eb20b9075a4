"""The step function's record → a table, a figure and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lapwing_studies.report.cells import number, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.reproduce.step import X, Y
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"exact": INK, "MAP": MAP, "BNN": SAMPLED, "GLM": GLM}


def page(record: Record) -> StudyPage:
    run = record["runs"][0]
    rows = [(method, *(number(v) for v in values)) for method, values in run["values"].items()]
    heads = ("method", *(f"x = {x:g}" for x in run["at"]))
    return StudyPage(
        title="A step: why sampled weights underfit",
        lead=(
            "f(x) = 5 tanh(w x + b) on six points, w and b ~ N(0, 1). The exact posterior knows that the step goes up; "
            "its Gaussian approximation gives a part of its mass to steps that go down, and sampling them costs.",
        ),
        figures=(
            Figure.of(
                "step",
                "The predictive, and the posterior of the slope",
                "Sampled weights (purple) saturate well below one; the linearised network (teal) does not.",
                (
                    Panel("curves", "p(y = 1 | x) by every method.", partial(_curves, run=run), (5.0, 3.6)),
                    Panel("weights", "Posterior of w, exact and Gaussian.", partial(_weights, run=run), (5.0, 3.6)),
                ),
                keys=(
                    Key("exact", "line"),
                    Key("MAP", "line map"),
                    Key("BNN, sampled weights", "line sampled"),
                    Key("GLM", "line glm"),
                ),
            ),
        ),
        tables=(table("values", "p(y = 1 | x)", "To the right of the data.", heads, rows),),
        notes=(
            "The linearised network cannot turn its step around: it is f + J (θ − θ*), and far from the data the "
            "saturated tanh leaves J near zero.",
            "What differs from the paper: its points and prior are not known, so these are our own.",
        ),
        settings={
            "exact": "801 × 801 points over eight prior standard deviations each way",
            "BNN": "4,000 draws of the weights",
        },
    )


def _curves(ax: Axes, run: Record) -> None:
    for method, values in run["curves"].items():
        ax.plot(run["x"], values, color=COLOURS[method], linewidth=2.2 if method == "exact" else 1.8)
    ax.plot(X, Y, "o", color=INK, markersize=5, clip_on=False)
    ax.set(xlim=(-4, 4), ylim=(0, 1), xlabel="x", ylabel="p(y = 1 | x)")
    ax.set_title("predictive")


def _weights(ax: Axes, run: Record) -> None:
    ax.fill_between(run["w"], run["weight_density"]["exact"], color=INK, alpha=0.2, linewidth=0)
    ax.plot(run["w"], run["weight_density"]["Laplace"], color=GLM)
    ax.axvline(0, color=MUTED, linewidth=1)
    ax.set(xlim=(-1.5, 3.5), ylim=(0, None), xlabel="w", ylabel="density")
    ax.set_title("posterior of w: exact (grey), Gaussian")
