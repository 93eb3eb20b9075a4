"""The record of the comparison with temperature scaling and ensembles → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import best, mean, number, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.quality import gains, trainings
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"MAP": MAP, "temperature": SAMPLED, "Lapwing": GLM}


def page(record: Record) -> StudyPage:
    tasks = grouped(record["runs"], "task")
    words = "Test NLL above the ensemble's, nats: zero is what several networks reach. A bar is the mean over seeds."
    drawn = Panel("nll", words, partial(_draw, record=record), (7.5, 1.4 + 0.6 * len(tasks)))
    keys = [Key(*pair) for pair in (("MAP", "dot map"), ("temperature", "dot sampled"), ("Lapwing", "dot glm"))]
    return StudyPage(
        title="Beside temperature scaling and an ensemble",
        lead=(
            "BatchNorm ResNets on images and small transformers on texts: lw.fit, lw.tune with 1,000 held-out rows and "
            "predict, all with default arguments, beside the network, its temperature-scaled form and an ensemble.",
        ),
        figures=(Figure.of("nll", "Test NLL", words, (drawn,), keys=keys),),
        tables=(nll_table(record), costs(record)),
        notes=(
            f"Means over {record['n_seeds']} seeds: the networks and the held-out rows differ, the training and the "
            "test data do not. The ensemble averages the probabilities of the networks of all seeds.",
        ),
        settings={runs[0]["data"]: _setting(runs[0]) for runs in tasks.values()},
    )


def nll_table(record: Record) -> Table:
    tasks, n = grouped(record["runs"], "task"), record["ensembles"][0]["n_networks"]
    rows = [
        (runs[0]["data"], runs[0]["network"],
         *best([mean([run["nll"][method] for run in runs], "{:.4f}") for method in COLOURS]),
         mean(gains(runs), "{:+.4f}"), number(ensemble["nll"], "{:.4f}"))
        for runs, ensemble in zip(tasks.values(), record["ensembles"], strict=True)
    ]  # fmt: skip
    return table(
        "nll", "Test NLL", "Nats per datum; the best of the three that take one network in bold.",
        ("data", "network", *COLOURS, "below temperature", f"ensemble of {n}"), rows,
        "Below temperature: the mean over seeds of the paired difference, with its standard error.",
    )  # fmt: skip


def costs(record: Record) -> Table:
    phases = ("train", "fit", "tune", "predict")
    rows = [
        (runs[0]["data"], *(mean([run["seconds"][k] for run in runs], "{:.1f}") for k in phases),
         number(trainings(runs), "{:.2f}"))
        for runs in grouped(record["runs"], "task").values()
    ]  # fmt: skip
    return table(
        "costs", "CPU seconds", "One thread. An ensemble of five takes four further trainings.",
        ("data", "one training", *phases[1:], "trainings in all"), rows, "Predict is for all test data.",
    )  # fmt: skip


def _draw(ax: Axes, record: Record) -> None:
    tasks = grouped(record["runs"], "task")
    ax.axvline(0, color=MUTED, linewidth=1.2)
    for row, (runs, ensemble) in enumerate(zip(tasks.values(), record["ensembles"], strict=True)):
        for k, (method, colour) in enumerate(COLOURS.items()):
            found, at = [run["nll"][method] - ensemble["nll"] for run in runs], row + 0.18 * (k - 1)
            ax.scatter(found, [at] * len(found), s=16, alpha=0.6, color=colour)
            ax.plot(sum(found) / len(found), at, "|", color=INK, markersize=9)
    axes.rows(ax, [runs[0]["data"] for runs in tasks.values()])
    ax.set_xlabel("test NLL above the ensemble's")


def _setting(run: Record) -> str:
    rows = f"{run['n_train']:,} rows trained on, {run['n_test']:,} tested"
    return f"{run['network']}, {run['parameters']:,} parameters, {run['structure']}; {rows}"
