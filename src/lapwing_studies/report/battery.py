"""The battery's record → tables, figures and a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.claims import table_of
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, GRID, MUTED, OUTSIDE, SAMPLED
from lapwing_studies.report.palette import MAP as MAP_COLOUR
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.summary import (
    BOTH,
    EVIDENCE,
    MAP,
    TEMPERATURE,
    Line,
    claims,
    lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.battery import BatteryRecord

METHODS = (MAP, TEMPERATURE, EVIDENCE, BOTH)
COLOURS = {MAP: MAP_COLOUR, TEMPERATURE: OUTSIDE, EVIDENCE: SAMPLED, BOTH: GLM}
LOOKS = {MAP: "dot map", TEMPERATURE: "dot outside", EVIDENCE: "dot sampled", BOTH: "dot glm"}
WIDEST = 0.25  # nats: larger differences to temperature scaling are drawn as arrows at the edge


def page(record: BatteryRecord, command: str) -> StudyPage:
    tasks = lines(record)
    return StudyPage(
        title="Error bars without knobs",
        lead=(
            f"{len(tasks)} tasks on real data. Each network was trained as people train; then lw.fit, lw.tune and "
            "predict ran with default arguments, once with the training data alone and once with held-out data.",
            "The bar is not the plain network (MAP) but the network with its temperature, or for regression its noise, "
            "fitted to the same held-out data.",
        ),
        headlines=tuple(_headline(claim) for claim in claims(record)[1:4]),
        figures=(nll_figure(tasks), auc_figure(tasks)),
        tables=(claims_table(record), nll_table(record), *(score_table(record, *words) for words in _OTHERS)),
        notes=(
            "Classes: OOD-AUC by the entropy of the predictive probabilities; numbers: by the predictive variance, "
            "which is constant for MAP. Calibration of numbers is that of nine central intervals, from 10% to 90%. "
            "Early stopping and tuning use the same held-out data, as people do.",
            *dict.fromkeys(f"{r['task']}: outside means {r['outside']}." for r in record["runs"]),
        ),
        settings=tuple(_settings(tasks)),
        command=command,
    )


_OTHERS = (
    ("ece", "Calibration", "Expected calibration error, ten bins; lower is better.", 1.0),
    ("ood_auc", "The alarm", "Chance that an input from outside gets the higher score; higher is better.", -1.0),
    ("error", "Error", "Share of wrong labels, or RMSE of the standardised target; lower is better.", 1.0),
)


def _headline(claim: Claim) -> Headline:
    return Headline(claim.found, f"{claim.says} (wanted {claim.wanted}{'' if claim.holds else '; missed'})")


def claims_table(record: BatteryRecord) -> Table:
    return table_of(
        claims(record),
        title="What is asked of the defaults",
        see="Counts asked of twelve tasks are asked of the same share of these.",
    )


def nll_table(record: BatteryRecord) -> Table:
    """Test NLL with its standard error, and whether `diagnose()` warned if the evidence alone did worse."""
    return Table(
        "nll",
        "Test NLL, nats per point",
        _over_seeds(record["n_seeds"]),
        ("task", "network", "training", *METHODS, "evidence alone"),
        tuple(_nll_row(task) for task in lines(record)),
        "Bold is the best of its row. “Warned” means that diagnose() had a concern about the evidence: that it is "
        "unreliable there, or only indicative.",
    )


def _over_seeds(n: int) -> str:
    return f"Means over {n} seeds ± standard error; lower is better." if n > 1 else "One seed; lower is better."


def _nll_row(task: Line) -> tuple[Cell, ...]:
    first, word = task.runs[0], "better than MAP"
    if task.evidence_is_worse:
        word = "worse, warned" if task.distrusted else "worse, silent"
    words = (task.task, first["network"], first["stops"])
    return (*(Cell(w, w) for w in words), *_best_of(task, "nll", 1.0), Cell(word, word))


def score_table(record: BatteryRecord, key: str, title: str, see: str, sign: float) -> Table:
    rows = tuple((Cell(t.task, t.task), *_best_of(t, key, sign)) for t in lines(record))
    return Table(key, title, see, ("task", *METHODS), rows)


def _best_of(task: Line, key: str, sign: float) -> list[Cell]:
    """The four methods; values that print the same as the best count as best."""
    shown = {m: f"{task.mean(m, key):.3f}" for m in METHODS}
    best = shown[min(METHODS, key=lambda m: sign * task.mean(m, key))]
    return [
        Cell(
            shown[m] + (f" ± {task.spread(m, key):.3f}" if key == "nll" and len(task.runs) > 1 else ""),
            task.mean(m, key),
            "best" if shown[m] == best else "",
        )
        for m in METHODS
    ]


def nll_figure(tasks: list[Line]) -> Figure:
    return Figure(
        "nll",
        "What each gains on temperature scaling",
        "Right of the line is better than the temperature-scaled network. An arrow leaves the picture.",
        (GAINS.panel("nll", tasks),),
        keys=tuple(Key(m, LOOKS[m]) for m in GAINS.methods),
        wide="wide",
    )


def auc_figure(tasks: list[Line]) -> Figure:
    means = ", ".join(f"{m} {fmean(t.mean(m, 'ood_auc') for t in tasks):.3f}" for m in METHODS)
    return Figure(
        "auc",
        "Does it notice inputs from elsewhere?",
        f"OOD-AUC, means over tasks: {means}.",
        (ALARMS.panel("auc", tasks),),
        keys=tuple(Key(m, LOOKS[m]) for m in METHODS),
        wide="wide",
    )


@dataclass(frozen=True)
class Dots:
    """One row per task, one dot per method."""

    axis: str
    methods: tuple[str, ...]
    value: Callable[[Line, str], float]
    limits: tuple[float, float]

    def paint(self, ax: Axes, tasks: list[Line]) -> None:
        low, high = self.limits
        ax.axvline((low + high) / 2, color=MUTED, linewidth=1.2)
        for row, task in enumerate(tasks):
            ax.axhline(row, color=GRID, linewidth=0.7, zorder=0)
            for method in self.methods:
                _dot(ax, self.value(task, method), row, COLOURS[method], self.limits)
        margin = 0.04 * (high - low)
        ax.set(xlim=(low - margin, high + margin), xlabel=self.axis)
        ax.set_yticks(range(len(tasks)), [t.task for t in tasks])
        ax.set_ylim(len(tasks) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)

    def panel(self, name: str, tasks: list[Line]) -> str:
        shape = (9.0, 1.0 + 0.3 * len(tasks))
        return panel(name, f"{self.axis}, by task.", lambda ax: self.paint(ax, tasks), shape=shape)


GAINS = Dots(
    "NLL saved against temperature scaling (nats)",
    (MAP, EVIDENCE, BOTH),
    lambda task, method: task.gain(TEMPERATURE, method),
    (-WIDEST, WIDEST),
)
ALARMS = Dots("OOD-AUC", METHODS, lambda task, method: task.mean(method, "ood_auc"), (0.0, 1.0))


def picture(record: BatteryRecord, path: Path) -> Path:
    """The gain of each method over temperature scaling."""
    tasks = lines(record)
    return write_picture([partial(_gains_with_legend, tasks=tasks)], path, shape=(9.0, 1.4 + 0.3 * len(tasks)))


def _gains_with_legend(ax: Axes, tasks: list[Line]) -> None:
    GAINS.paint(ax, tasks)
    for method in GAINS.methods:
        ax.plot([], [], "o", color=COLOURS[method], label=method)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=3, frameon=False)


def _dot(ax: Axes, x: float, row: int, colour: str, limits: tuple[float, float]) -> None:
    inside = min(max(x, limits[0]), limits[1])
    marker = "o" if inside == x else "<" if x < limits[0] else ">"
    ax.plot(inside, row, marker, color=colour, markersize=7, alpha=0.85, clip_on=False)


def _settings(tasks: list[Line]) -> list[Setting]:
    settings = []
    for task in tasks:
        r = task.runs[0]
        rows = f"{r['n_train']:,} / {r['n_validation']:,} / {r['n_test']:,} rows"
        words = f"{r['network']}, {r['parameters']:,} parameters, {r['structure']}; {rows}"
        settings.append(Setting(name=task.task, value=words))
    return settings
