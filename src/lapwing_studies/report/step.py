"""The step function's record → a table, a figure and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.step import StepRecord, StepRun

COLOURS = {"exact": INK, "MAP": MAP, "BNN": SAMPLED, "GLM": GLM}


def page(record: StepRecord, command: str) -> StudyPage:
    run = record["runs"][0]
    last = {method: values[-1] for method, values in run["values"].items()}
    return StudyPage(
        title="A step: why sampled weights underfit",
        lead=(
            "f(x) = 5 tanh(w x + b) on six points, w and b ~ N(0, 1). The exact posterior knows that the step goes up; "
            "its Gaussian approximation gives a part of its mass to steps that go down, and sampling them costs.",
        ),
        headlines=(
            Headline(
                f"{run['negative']['exact']:.1g} against {run['negative']['Laplace']:.2g}",
                "probability of a step that goes down: exact, and under the Gaussian",
            ),
            Headline(f"{last['BNN']:.3f}", f"p(y = 1) at x = {run['at'][-1]:g} by sampled weights"),
            Headline(f"{last['GLM']:.3f}", f"by the linearised network; exactly {last['exact']:.3f}"),
        ),
        figures=(figure(run),),
        tables=(table(run),),
        notes=(
            "The linearised network cannot turn its step around: it is f + J (θ − θ*), and far from the data the "
            "saturated tanh leaves J near zero.",
        ),
        settings=(
            Setting(name="exact", value="801 × 801 points over eight prior standard deviations each way"),
            Setting(name="log evidence, exact", value=f"{run['log_evidence']['exact']:.4f}"),
            Setting(name="log evidence, Laplace", value=f"{run['log_evidence']['Laplace']:.4f}"),
            Setting(name="BNN", value="4,000 draws of the weights"),
        ),
        command=command,
    )


def table(run: StepRun) -> Table:
    rows = tuple(
        (Cell(method, method), *(Cell(f"{v:.3f}", v) for v in values)) for method, values in run["values"].items()
    )
    return Table(
        "values", "p(y = 1 | x)", "To the right of the data.", ("method", *(f"x = {x:g}" for x in run["at"])), rows
    )


def figure(run: StepRun) -> Figure:
    return Figure(
        "step",
        "The predictive, and the posterior of the slope",
        "Sampled weights (purple) saturate well below one; the linearised network (teal) does not.",
        (
            panel("curves", "p(y = 1 | x) by every method.", partial(_curves, run=run), shape=(5.0, 3.6)),
            panel("weights", "The posterior of w, exact and Gaussian.", partial(_weights, run=run), shape=(5.0, 3.6)),
        ),
        keys=(
            Key("exact", "line"),
            Key("MAP", "line map"),
            Key("BNN, sampled weights", "line sampled"),
            Key("GLM", "line glm"),
        ),
    )


def _curves(ax: Axes, run: StepRun) -> None:
    for method, values in run["curves"].items():
        ax.plot(run["x"], values, color=COLOURS[method], linewidth=2.2 if method == "exact" else 1.8)
    ax.plot([-2, -1.5, -1], [0] * 3, "o", color=INK, markersize=5, clip_on=False)
    ax.plot([1, 1.5, 2], [1] * 3, "o", color=INK, markersize=5, clip_on=False)
    ax.set(xlim=(-4, 4), ylim=(0, 1), xlabel="x", ylabel="p(y = 1 | x)")
    ax.set_title("predictive")


def _weights(ax: Axes, run: StepRun) -> None:
    ax.fill_between(run["w"], run["weight_density"]["exact"], color=INK, alpha=0.2, linewidth=0)
    ax.plot(run["w"], run["weight_density"]["Laplace"], color=GLM)
    ax.axvline(0, color=MUTED, linewidth=1)
    ax.set(xlim=(-1.5, 3.5), ylim=(0, None), xlabel="w")
    ax.set_title("posterior of w: exact (grey), Gaussian")


def picture(record: StepRecord, path: Path) -> Path:
    run = record["runs"][0]
    return write_picture([partial(_curves, run=run), partial(_weights, run=run)], path, shape=(10.0, 3.6))
