"""The record of marginal-likelihood training → tables, a figure and a page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report.cells import mean, number, over_seeds, table
from lapwing_studies.report.figures import Figure, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.marglik import chosen, spread
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.published import MARGLIK_2021
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# h = 6 of the worked example: γ, α, β, noise, log evidence and RMSE, best of eight restarts.
WORKED = {"gamma": 12.553, "alpha": 0.1045, "beta": 176.3, "noise_std": 0.0753, "log_evidence": -0.504, "rmse": 0.0488}


def page(record: Record) -> StudyPage:
    run = record["runs"][-1]
    paints = {"Log evidence by epoch.": _evidence, "Precisions by epoch.": _precisions, "The grid.": _grid}
    drawn = [Panel(f"marglik-{k}", words, partial(paint, run=run), (4.6, 3.6))
             for k, (words, paint) in enumerate(paints.items())]  # fmt: skip
    return StudyPage(
        title="Training by the marginal likelihood",
        lead=(
            "One training whose layerwise precisions follow the Laplace evidence, beside a grid of single precisions, "
            "each trained, of which held-out data choose one.",
        ),
        figures=(
            Figure.of(
                "marglik",
                f"The evidence and the precisions along the way ({run['data']}, {run['network']})",
                "Every point is an update: a fit at the present weights, and steps up its evidence.",
                drawn,
            ),
        ),
        tables=(scores(record), precisions(record), sines(record)),
        notes=(
            "Test scores are those of the network at the weights; the linearised predictive is in a column of its own.",
            "What differs from the paper: parts of the training data, smaller networks, fewer epochs outside the "
            "faithful tier, and a grid of six precisions with held-out data in place of cross-validation.",
        ),
        settings={"training data": f"{record['n_train']:,}", "epochs": str(record["epochs"])},
    )


def scores(record: Record) -> Table:
    rows = []
    for (data, network), runs in grouped(record["runs"], "data", "network").items():
        best, theirs = [chosen(run) for run in runs], MARGLIK_2021.get((data, network))
        rows.append((
            data, network, number(fmean(b["precision"] for b in best), "{:.3g}"),
            *_scores([b["test"] for b in best]), *_scores([run["marglik"] for run in runs]),
            mean([-run["marglik_glm"]["nll"] for run in runs]),
            *(number(None if theirs is None else theirs[way][1]) for way in ("grid", "evidence")),
        ))  # fmt: skip
    columns = (
        "data", "network", "grid's precision", "accuracy", "log likelihood", "evidence: accuracy", "log likelihood",
        "linearised", "published grid", "published evidence",
    )  # fmt: skip
    return table(
        "scores", "Test accuracy and log likelihood", f"Per datum. {over_seeds(record)}", columns, rows,
        "Published: log likelihoods with all training data, other networks, cross-validation in place of the grid.",
    )  # fmt: skip


def _scores(found: Sequence[Record]) -> tuple[Cell, Cell]:
    return mean([s["accuracy"] for s in found], "{:.1%}"), mean([-s["nll"] for s in found])


def precisions(record: Record) -> Table:
    rows = [
        (run["data"], run["network"], ", ".join(f"{v:.3g}" for v in run["precisions"]),
         number(10 ** spread(run), "{:.1f}"))
        for run in record["runs"]
    ]  # fmt: skip
    columns = ("data", "network", "precisions", "largest / smallest")
    return table("precisions", "Prior precisions, layer by layer", "From the input on.", columns, rows)


def sines(record: Record) -> Table:
    found = {"by lw.train.marglik": record["sines"][0], "worked example": WORKED}
    rows = [(name, *(number(values[key], "{:.4g}") for key in WORKED)) for name, values in found.items()]
    return table(
        "sine", "MacKay's loop: 41 points of a sine, 1-6-1", "Best of two restarts; the worked example of eight.",
        ("", "γ", "α", "1/σ²", "σ", "log evidence", "RMSE"), rows,
    )  # fmt: skip


def _evidence(ax: Axes, run: Record) -> None:
    ax.plot([t["epoch"] for t in run["trace"]], [t["log_evidence"] for t in run["trace"]], color=GLM, marker="o")
    ax.set(xlabel="epoch", ylabel="log evidence")
    ax.set_title("log evidence")


def _precisions(ax: Axes, run: Record) -> None:
    colours = (INK, GLM, SAMPLED, MAP, MUTED)
    for i, name in enumerate(run["groups"]):
        values = [t["precisions"][i] for t in run["trace"]]
        ax.plot([t["epoch"] for t in run["trace"]], values, color=colours[i % 5], marker="o", label=f"layer {name}")
    ax.set(yscale="log", xlabel="epoch", ylabel="precision")
    if len(run["groups"]) <= len(colours):
        ax.legend(frameon=False, fontsize=8)
    ax.set_title("prior precisions, by layer")


def _grid(ax: Axes, run: Record) -> None:
    at = [entry["precision"] for entry in run["grid"]]
    ax.plot(at, [e["test"]["nll"] for e in run["grid"]], color=MAP, marker="o", label="one precision, test")
    ax.plot(at, [e["held_out"]["nll"] for e in run["grid"]], color=MAP, linestyle=":", label="held out")
    ax.axhline(run["marglik"]["nll"], color=GLM, label="by the evidence, test")
    low = min(e["test"]["nll"] for e in run["grid"])  # a prior that forbids learning would hide the rest
    ax.set(xscale="log", xlabel="precision of the grid", ylabel="NLL", ylim=(0.9 * low, 1.6 * low))
    ax.legend(frameon=False, fontsize=8)
    ax.set_title("against the grid")
