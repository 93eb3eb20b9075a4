"""The record of the battery → tables, figures and a page."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import best, mean, over_seeds, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, MUTED, OUTSIDE, SAMPLED
from lapwing_studies.report.palette import MAP as MAP_COLOUR
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.study import Record
from lapwing_studies.reproduce.summary import BOTH, EVIDENCE, MAP, METHODS, TEMPERATURE, Line, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {MAP: MAP_COLOUR, TEMPERATURE: OUTSIDE, EVIDENCE: SAMPLED, BOTH: GLM}
LOOKS = {MAP: "dot map", TEMPERATURE: "dot outside", EVIDENCE: "dot sampled", BOTH: "dot glm"}
WIDEST = 0.25  # nats: larger differences to temperature scaling are drawn as arrows at the edge
# Score → title, what it is, and the sign of "better".
SCORES = {
    "ece": ("Calibration", "Expected calibration error, ten bins; lower is better.", 1.0),
    "ood_auc": ("The alarm", "Chance that an input from outside gets the higher score; higher is better.", -1.0),
    "error": ("Error", "Share of wrong labels, or RMSE of the standardised target; lower is better.", 1.0),
}


def page(record: Record) -> StudyPage:
    tasks = lines(record)
    means = ", ".join(f"{m} {fmean(t.mean(m, 'ood_auc') for t in tasks):.3f}" for m in METHODS)
    others = (MAP, EVIDENCE, BOTH)
    gains = _dots("gains", "NLL saved against temperature scaling (nats)", others, tasks, (-WIDEST, WIDEST),
                  lambda task, method: task.gain(TEMPERATURE, method))  # fmt: skip
    alarms = _dots("auc", "OOD-AUC", METHODS, tasks, (0.0, 1.0), lambda task, method: task.mean(method, "ood_auc"))
    return StudyPage(
        title="Error bars without knobs",
        lead=(
            f"{len(tasks)} tasks on real data. Each network was trained as people train; then lw.fit, lw.tune and "
            "predict ran with default arguments, once with the training data alone and once with held-out data.",
            "The bar is not the plain network (MAP) but the network with its temperature, or for regression its noise, "
            "fitted to the same held-out data.",
        ),
        figures=(
            Figure.of(
                "nll",
                "What each gains on temperature scaling",
                "Right of the line is better than the temperature-scaled network. An arrow leaves the picture.",
                (gains,),
                keys=tuple(Key(m, LOOKS[m]) for m in others),
            ),
            Figure.of(
                "auc",
                "Does it notice inputs from elsewhere?",
                f"OOD-AUC, means over tasks: {means}.",
                (alarms,),
                keys=tuple(Key(m, LOOKS[m]) for m in METHODS),
            ),
        ),
        tables=(nll_table(record), *(score_table(record, key) for key in SCORES)),
        notes=(
            "Counts asked of twelve tasks are asked of the same share of these.",
            "Classes: OOD-AUC by the entropy of the predictive probabilities; numbers: by the predictive variance, "
            "which is constant for MAP. Calibration of numbers is that of nine central intervals, from 10% to 90%. "
            "Early stopping and tuning use the same held-out data, as people do.",
            *dict.fromkeys(f"{r['task']}: outside means {r['outside']}." for r in record["runs"]),
        ),
        settings={task.task: _setting(task.runs[0]) for task in tasks},
    )


def nll_table(record: Record) -> Table:
    """Test NLL with its standard error, and whether `diagnose()` warned if the evidence alone did worse."""
    rows = []
    for t in lines(record):
        word = "better than MAP"
        if t.evidence_is_worse:
            word = "worse, warned" if t.distrusted else "worse, silent"
        cells = best([mean(t.values(m, "nll")) for m in METHODS])
        rows.append((t.task, t.runs[0]["network"], t.runs[0]["stops"], *cells, word))
    return table(
        "nll", "Test NLL, nats per point", over_seeds(record),
        ("task", "network", "training", *METHODS, "evidence alone"), rows,
        "Bold is the best of its row. “Warned” means that diagnose() had a concern about the evidence: that it is "
        "unreliable there, or only indicative.",
    )  # fmt: skip


def score_table(record: Record, key: str) -> Table:
    title, see, sign = SCORES[key]
    rows = [(t.task, *best([mean([t.mean(m, key)]) for m in METHODS], sign)) for t in lines(record)]
    return table(key, title, see, ("task", *METHODS), rows)


def _dots(
    name: str,
    words: str,
    methods: tuple[str, ...],
    tasks: list[Line],
    limits: tuple[float, float],
    value: Callable[[Line, str], float],
) -> Panel:
    """One row per task, one dot per method."""

    def paint(ax: Axes) -> None:
        low, high = limits
        ax.axvline((low + high) / 2, color=MUTED, linewidth=1.2)
        for row, task in enumerate(tasks):
            for method in methods:
                _dot(ax, value(task, method), row, COLOURS[method], limits)
        margin = 0.04 * (high - low)
        axes.rows(ax, [t.task for t in tasks])
        ax.set(xlim=(low - margin, high + margin), xlabel=words)

    return Panel(name, f"{words}, by task.", paint, (9.0, 1.2 + 0.3 * len(tasks)))


def _dot(ax: Axes, x: float, row: int, colour: str, limits: tuple[float, float]) -> None:
    inside = min(max(x, limits[0]), limits[1])
    marker = "o" if inside == x else "<" if x < limits[0] else ">"
    ax.plot(inside, row, marker, color=colour, markersize=7, alpha=0.85, clip_on=False)


def _setting(run: Record) -> str:
    rows = f"{run['n_train']:,} / {run['n_validation']:,} / {run['n_test']:,} rows"
    return f"{run['network']}, {run['parameters']:,} parameters, {run['structure']}; {rows}"
