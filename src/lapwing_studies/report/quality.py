"""The record of the comparison with temperature scaling and ensembles → tables, a figure and a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, GRID, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.quality import EnsembleRun, QualityRecord, QualityRun

MARGIN = 0.005  # nats by which a task may be worse than temperature scaling
METHODS = (("MAP", MAP), ("temperature", SAMPLED), ("Lapwing", GLM))


@dataclass(frozen=True)
class Line:
    """One task over its seeds, and the ensemble of its networks."""

    runs: tuple[QualityRun, ...]
    ensemble: EnsembleRun

    @property
    def first(self) -> QualityRun:
        return self.runs[0]

    def nll(self, method: str) -> float:
        return fmean(run["nll"][method] for run in self.runs)

    @property
    def gain(self) -> float:
        """Nats below temperature scaling, mean over seeds."""
        return self.nll("temperature") - self.nll("Lapwing")

    @property
    def spread(self) -> float:
        gains = [run["nll"]["temperature"] - run["nll"]["Lapwing"] for run in self.runs]
        return stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0

    @property
    def trainings(self) -> float:
        """Cost of fit, tune and predict, in units of training one network."""
        ours = fmean(sum(run["seconds"][k] for k in ("fit", "tune", "predict")) for run in self.runs)
        return ours / fmean(run["seconds"]["train"] for run in self.runs)


def lines(record: QualityRecord) -> list[Line]:
    return [
        Line(tuple(run for run in record["runs"] if run["task"] == ensemble["task"]), ensemble)
        for ensemble in record["ensembles"]
    ]


def page(record: QualityRecord, command: str) -> StudyPage:
    tasks = lines(record)
    below, worst = sum(t.gain > 0 for t in tasks), -min(t.gain for t in tasks)
    return StudyPage(
        title="Beside temperature scaling and an ensemble",
        lead=(
            "BatchNorm ResNets on images and small transformers on texts: lw.fit, lw.tune with 1,000 held-out rows and "
            "predict, all with default arguments, beside the network, its temperature-scaled form and an ensemble.",
        ),
        headlines=(
            Headline(f"{below} of {len(tasks)}", "tasks with test NLL below temperature scaling's"),
            Headline(f"{worst:+.4f}", f"nats: the worst task against temperature scaling (allowed {MARGIN:+.3f})"),
            Headline(f"{max(t.trainings for t in tasks):.2f}", "trainings at most for fit, tune and predict"),
        ),
        figures=(figure(tasks),),
        tables=(table(record), costs(record)),
        notes=(
            f"Means over {record['n_seeds']} seeds: the networks and the held-out rows differ, the training and the "
            "test data do not. The ensemble averages the probabilities of the networks of all seeds.",
        ),
        settings=tuple(_settings(tasks)),
        command=command,
    )


def table(record: QualityRecord) -> Table:
    rows = []
    for t in lines(record):
        nll = [t.nll(method) for method, _ in METHODS]
        rows.append((
            Cell(t.first["data"], t.first["data"]), Cell(t.first["network"], t.first["network"]),
            *(Cell(f"{v:.4f}", v, "best" if v == min(nll) else "") for v in nll),
            Cell(f"{t.gain:+.4f} ± {t.spread:.4f}", t.gain),
            Cell(f"{t.ensemble['nll']:.4f}", t.ensemble["nll"]),
        ))  # fmt: skip
    n = record["ensembles"][0]["n_networks"]
    columns = ("data", "network", "MAP", "temperature", "Lapwing", "below temperature", f"ensemble of {n}")
    return Table(
        "nll", "Test NLL", "Nats per datum; the best of the three that take one network in bold.", columns,
        tuple(rows), "Below temperature: the mean over seeds of the paired difference, with its standard error.",
    )  # fmt: skip


def costs(record: QualityRecord) -> Table:
    rows = []
    for t in lines(record):
        seconds = {k: fmean(run["seconds"][k] for run in t.runs) for k in t.first["seconds"]}
        rows.append((
            Cell(t.first["data"], t.first["data"]),
            *(Cell(f"{seconds[k]:.1f}", seconds[k]) for k in ("train", "fit", "tune", "predict")),
            Cell(f"{t.trainings:.2f}", t.trainings),
        ))  # fmt: skip
    columns = ("data", "one training", "fit", "tune", "predict", "trainings in all")
    return Table(
        "costs", "CPU seconds", "One thread; means over seeds. An ensemble of five takes four further trainings.",
        columns, tuple(rows), "Predict is for all test data.",
    )  # fmt: skip


def figure(tasks: list[Line]) -> Figure:
    shape = (5.4, 1.2 + 0.6 * len(tasks))
    draw = partial(_draw, tasks=tasks)
    keys = (Key("MAP", "dot map"), Key("temperature", "dot sampled"), Key("Lapwing", "dot glm"))
    words = "Test NLL above the ensemble's, nats: zero is what several networks reach."
    return Figure("nll", "Test NLL", words, (panel("nll", words, draw, shape=shape),), keys=keys)


def _draw(ax: Axes, tasks: list[Line]) -> None:
    ax.axvline(0, color=MUTED, linewidth=1.2)
    for row, t in enumerate(tasks):
        ax.axhline(row, color=GRID, linewidth=0.7, zorder=0)
        for k, (method, colour) in enumerate(METHODS):
            at = row + 0.18 * (k - 1)
            ax.scatter([run["nll"][method] - t.ensemble["nll"] for run in t.runs], [at] * len(t.runs), s=12, alpha=0.5,
                       color=colour)  # fmt: skip
            ax.plot(t.nll(method) - t.ensemble["nll"], at, "|", color=INK, markersize=9)
    ax.set_yticks(range(len(tasks)), [t.first["data"] for t in tasks])
    ax.set_ylim(len(tasks) - 0.4, -0.6)
    ax.set_xlabel("test NLL above the ensemble's")
    ax.grid(axis="y", visible=False)


def picture(record: QualityRecord, path: Path) -> Path:
    return write_picture([partial(_with_legend, tasks=lines(record))], path, shape=(7.5, 3.6))


def _with_legend(ax: Axes, tasks: list[Line]) -> None:
    _draw(ax, tasks)
    for method, colour in METHODS:
        ax.plot([], [], "o", color=colour, label=method)
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, frameon=False)


def _settings(tasks: list[Line]) -> list[Setting]:
    return [
        Setting(
            name=t.first["data"],
            value=f"{t.first['network']}, {t.first['parameters']:,} parameters, {t.first['structure']}; "
            f"{t.first['n_train']:,} rows trained on, {t.first['n_test']:,} tested",
        )
        for t in tasks
    ]
