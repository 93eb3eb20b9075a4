"""The record of marginal-likelihood training → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.marglik import chosen, spread
from lapwing_studies.reproduce.published import MARGLIK_2021

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.marglik import MarglikRecord, MarglikRun

# h = 6 of the worked example: γ, α, β, noise, log evidence and RMSE, best of eight restarts.
WORKED = (12.553, 0.1045, 176.3, 0.0753, -0.504, 0.0488)


def page(record: MarglikRecord, command: str) -> StudyPage:
    gains = [gain(run) for run in record["runs"]]
    return StudyPage(
        title="Training by the marginal likelihood",
        lead=(
            "One training whose layerwise precisions follow the Laplace evidence, beside a grid of single precisions, "
            "each trained, of which held-out data choose one.",
        ),
        headlines=(
            Headline(f"{min(gains):+.3f}", "worst test log likelihood against the grid's choice, nats"),
            Headline(f"{sum(g >= -0.01 for g in gains)} of {len(gains)}", "tasks where it is at most 0.01 below"),
            Headline(f"{10 ** max(map(spread, record['runs'])):.0f} ×", "between the precisions of layers, at most"),
        ),
        figures=(figure(record),),
        tables=(table(record), precisions(record), sines(record)),
        notes=(
            f"{sum(rises(run) for run in record['runs'])} of {len(record['runs'])} traces of the evidence end above "
            "where they began. Test scores are those of the network at the weights; the linearised predictive is in a "
            "column of its own.",
        ),
        settings=(
            Setting(name="training data", value=f"{record['n_train']:,}"),
            Setting(name="epochs", value=str(record["epochs"])),
            Setting(name="seeds", value=str(record["n_seeds"])),
        ),
        command=command,
    )


def gain(run: MarglikRun) -> float:
    """Test log likelihood above that of the grid's choice."""
    return float(chosen(run)["test"]["nll"] - run["marglik"]["nll"])


def rises(run: MarglikRun) -> bool:
    return bool(run["trace"][-1]["log_evidence"] > run["trace"][0]["log_evidence"])


def table(record: MarglikRecord) -> Table:
    rows = []
    for run in record["runs"]:
        best, theirs = chosen(run), MARGLIK_2021.get((run["data"], run["network"]))
        rows.append((
            Cell(run["data"], run["data"]), Cell(run["network"], run["network"]),
            Cell(f"{best['precision']:.3g}", best["precision"]),
            Cell(f"{best['test']['accuracy']:.1%}", best["test"]["accuracy"]),
            Cell(f"{-best['test']['nll']:.3f}", -best["test"]["nll"]),
            Cell(f"{run['marglik']['accuracy']:.1%}", run["marglik"]["accuracy"]),
            Cell(f"{-run['marglik']['nll']:.3f}", -run["marglik"]["nll"], "best" if gain(run) > 0 else ""),
            Cell(f"{-run['marglik_glm']['nll']:.3f}", -run["marglik_glm"]["nll"]),
            *(_published(theirs, way) for way in ("grid", "evidence")),
        ))  # fmt: skip
    columns = (
        "data", "network", "grid's precision", "accuracy", "log likelihood", "evidence: accuracy", "log likelihood",
        "linearised", "published grid", "published evidence",
    )  # fmt: skip
    return Table(
        "scores", "Test accuracy and log likelihood", "Per datum.", columns, tuple(rows),
        "Published: all training data, other networks, cross-validation in place of the grid.",
    )  # fmt: skip


def _published(entry: dict[str, tuple[float, float]] | None, way: str) -> Cell:
    return Cell("–", 0.0) if entry is None else Cell(f"{entry[way][1]:.3f}", entry[way][1])


def precisions(record: MarglikRecord) -> Table:
    rows = []
    for run in record["runs"]:
        listed = ", ".join(f"{v:.3g}" for v in run["precisions"])
        rows.append((
            Cell(run["data"], run["data"]), Cell(run["network"], run["network"]), Cell(listed, listed),
            Cell(f"{10 ** spread(run):.1f}", spread(run)),
        ))  # fmt: skip
    return Table(
        "precisions", "Prior precisions, layer by layer", "From the input on.",
        ("data", "network", "precisions", "largest / smallest"), tuple(rows),
    )  # fmt: skip


def sines(record: MarglikRecord) -> Table:
    run = record["sines"][0]
    found = (run["gamma"], run["alpha"], run["beta"], run["noise_std"], run["log_evidence"], run["rmse"])
    rows = tuple(
        (Cell(name, name), *(Cell(f"{v:.4g}", v) for v in values))
        for name, values in (("by lw.train.marglik", found), ("worked example", WORKED))
    )
    return Table(
        "sine", "MacKay's loop: 41 points of a sine, 1-6-1", "Best of two restarts; the worked example of eight.",
        ("", "γ", "α", "1/σ²", "σ", "log evidence", "RMSE"), rows,
    )  # fmt: skip


def figure(record: MarglikRecord) -> Figure:
    run = record["runs"][-1]
    return Figure(
        "marglik",
        f"The evidence and the precisions along the way ({run['data']}, {run['network']})",
        "Every point is an update: a fit at the present weights, and steps up its evidence.",
        (
            panel("evidence", "Log evidence by epoch.", partial(_evidence, run=run), shape=(4.6, 3.4)),
            panel("precisions", "Precisions by epoch.", partial(_precisions, run=run), shape=(4.6, 3.4)),
            panel("grid", "The grid, and the training by the evidence.", partial(_grid, run=run), shape=(4.6, 3.4)),
        ),
    )


def _evidence(ax: Axes, run: MarglikRun) -> None:
    ax.plot([t["epoch"] for t in run["trace"]], [t["log_evidence"] for t in run["trace"]], color=GLM, marker="o")
    ax.set(xlabel="epoch", ylabel="log evidence")
    ax.set_title("log evidence")


def _precisions(ax: Axes, run: MarglikRun) -> None:
    colours = (INK, GLM, SAMPLED, MAP, MUTED)
    for i, name in enumerate(run["groups"]):
        values = [t["precisions"][i] for t in run["trace"]]
        ax.plot([t["epoch"] for t in run["trace"]], values, color=colours[i % 5], marker="o", label=f"layer {name}")
    ax.set(yscale="log", xlabel="epoch", ylabel="precision")
    ax.legend(frameon=False, fontsize=8)
    ax.set_title("prior precisions")


def _grid(ax: Axes, run: MarglikRun) -> None:
    at = [entry["precision"] for entry in run["grid"]]
    ax.plot(at, [e["test"]["nll"] for e in run["grid"]], color=MAP, marker="o", label="one precision, test")
    ax.plot(at, [e["held_out"]["nll"] for e in run["grid"]], color=MAP, linestyle=":", label="held out")
    ax.axhline(run["marglik"]["nll"], color=GLM, label="by the evidence, test")
    low = min(e["test"]["nll"] for e in run["grid"])  # a prior that forbids learning would hide the rest
    ax.set(xscale="log", xlabel="precision of the grid", ylabel="NLL", ylim=(0.9 * low, 1.6 * low))
    ax.legend(frameon=False, fontsize=8)
    ax.set_title("against the grid")


def picture(record: MarglikRecord, path: Path) -> Path:
    run = record["runs"][-1]
    return write_picture(
        [partial(paint, run=run) for paint in (_evidence, _precisions, _grid)], path, shape=(12.0, 3.7)
    )
