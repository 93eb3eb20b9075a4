"""The record of the alarm study → tables, figures and a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure as Canvas

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, OUTSIDE, PAPER, SAMPLED, STYLE
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.alarm import FIRST_SEED, LEVEL, METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.alarm import AlarmRecord, AlarmRun, Example

ENTROPY, TEMPERATURE, EPISTEMIC, ALARM = METHODS
COLOURS = dict(zip(METHODS, (MAP, OUTSIDE, SAMPLED, GLM), strict=True))
LOOKS = dict(zip(METHODS, ("dot map", "dot outside", "dot sampled", "dot glm"), strict=True))
HEIGHT = 0.2  # of a bar
N_EXAMPLES = 3


@dataclass(frozen=True)
class Line:
    """One pair of datasets, over its seeds."""

    runs: tuple[AlarmRun, ...]

    @property
    def name(self) -> str:
        return f"{self.runs[0]['inside']} / {self.runs[0]['outside']}"

    def auroc(self, method: str) -> float:
        return fmean(run["auroc"][method] for run in self.runs)

    def gain(self, over: str) -> float:
        return self.auroc(ALARM) - self.auroc(over)

    def mean(self, value: Callable[[AlarmRun], float]) -> float:
        return fmean(value(run) for run in self.runs)


def lines(record: AlarmRecord) -> list[Line]:
    names = dict.fromkeys(run["pair"] for run in record["runs"])
    return [Line(tuple(run for run in record["runs"] if run["pair"] == name)) for name in names]


def page(record: AlarmRecord, command: str) -> StudyPage:
    pairs = lines(record)
    worst, mean = min(pairs, key=lambda p: p.gain(ENTROPY)), fmean(p.gain(ENTROPY) for p in pairs)
    false = fmean(p.mean(lambda run: run["false_alarms"]) for p in pairs)
    return StudyPage(
        title="An alarm for inputs the network was not trained for",
        lead=(
            f"{len(pairs)} pairs of data sets: a small network learns one of them, and is shown both. lw.fit, lw.tune "
            "with held-out data and lw.alarm ran with default arguments.",
            f"The score of the alarm was chosen on seeds 0 and 1 of these pairs; these are seeds from {FIRST_SEED} on.",
        ),
        headlines=(
            Headline(f"{mean:+.3f}", "AUROC gained on the plain network's entropy, mean over pairs (wanted ≥ 0.030)"),
            Headline(f"{worst.gain(ENTROPY):+.3f}", f"on the worst pair, {worst.name} (wanted ≥ −0.010)"),
            Headline(f"{false:.1%}", f"of test data raise a false alarm at {LEVEL:g}"),
        ),
        figures=tuple(figures(record)),
        tables=(claims_table(pairs), auroc_table(record), level_table(record)),
        notes=(
            "AUROC is the chance that an input from outside has the higher score, ties counted half. A table's outside "
            "are its test rows with every column moved by one standard deviation, up or down. SVHN is re-cropped. "
            "Entropy below 0.5 means that the network is surer of what it does not know.",
        ),
        settings=tuple(_settings(pairs)),
        command=command,
    )


def claims_table(pairs: list[Line]) -> Table:
    gains = [p.gain(ENTROPY) for p in pairs]
    better, asked = sum(p.gain(TEMPERATURE) > 0 for p in pairs), 6 * len(pairs) // 8
    rows = (
        ("worst AUROC against entropy", "≥ −0.010", f"{min(gains):+.3f}", min(gains) >= -0.01),
        ("mean AUROC against entropy", "≥ +0.030", f"{fmean(gains):+.3f}", fmean(gains) >= 0.03),
        ("better than temperature", f"≥ {asked} of {len(pairs)}", f"{better} of {len(pairs)}", better >= asked),
    )
    return Table(
        "claims",
        "What is asked of the alarm",
        "Means over seeds, by pair.",
        ("claim", "wanted", "found", "verdict"),
        tuple(tuple(Cell(w, w) for w in (*words, "holds" if holds else "missed")) for *words, holds in rows),
    )


def auroc_table(record: AlarmRecord) -> Table:
    return Table(
        "auroc",
        "AUROC by pair",
        f"Means over {record['n_seeds']} seeds; bold is the best of its row.",
        ("inside / outside", "network", "accuracy", *METHODS),
        tuple(_auroc_row(pair) for pair in lines(record)),
        "Entropy is that of the network's own probabilities, temperature that of the temperature-scaled ones, "
        "p.epistemic the mutual information of the tuned posterior.",
    )


def _auroc_row(pair: Line) -> tuple[Cell, ...]:
    accuracy = pair.mean(lambda run: run["accuracy"])
    shown = {m: f"{pair.auroc(m):.3f}" for m in METHODS}
    best = max(shown.values())
    cells = (Cell(shown[m], pair.auroc(m), "best" if shown[m] == best else "") for m in METHODS)
    words = (pair.name, pair.runs[0]["network"])
    return (*(Cell(w, w) for w in words), Cell(f"{accuracy:.1%}", accuracy), *cells)


def level_table(record: AlarmRecord) -> Table:
    rows = []
    for pair in lines(record):
        values = [pair.mean(lambda run, key=key: run[key]) for key in ("false_alarms", "raised")]  # type: ignore[misc]
        n, scale = pair.runs[0]["n_held_out"], max(run["scale"] for run in pair.runs)
        cells = (Cell(f"{n:,}", n), *(Cell(f"{v:.1%}", v) for v in values), Cell(f"{scale:.3g}", scale))
        rows.append((Cell(pair.name, pair.name), *cells))
    return Table(
        "level",
        f"Alarms at {LEVEL:g}",
        "How many test data raise an alarm, which are all false, and how many from outside do.",
        ("inside / outside", "held-out rows", "false alarms", "raised outside", "largest scale"),
        tuple(rows),
        "The guarantee is on the mean over held-out and test data. The scale is what held-out NLL multiplied the "
        "evidence's precisions by; the alarm undoes it.",
    )


def figures(record: AlarmRecord) -> list[Figure]:
    pairs, shape = lines(record), (9.0, 1.0 + 0.62 * len(lines(record)))
    found = [
        Figure(
            "auroc",
            "Does it notice inputs from elsewhere?",
            "The further a bar reaches, the better inside and outside are told apart; 0.5 is a coin.",
            (panel("auroc", "AUROC by pair and method.", partial(_bars, pairs=pairs), shape=shape),),
            keys=tuple(Key(m, LOOKS[m]) for m in METHODS),
            wide="wide",
        )
    ]
    if shown := examples(record):
        panels = (
            panel(f"example-{k}", f"{_title(e)}.", partial(_image, example=e), shape=(2.6, 2.9))
            for k, e in enumerate(shown)
        )
        found.append(
            Figure(
                "examples",
                "Three images that raise the alarm",
                "None is of a kind the network was trained for, and of these the network is surest.",
                tuple(panels),
            )
        )
    return found


def examples(record: AlarmRecord) -> list[Example]:
    """The examples of the first run with images."""
    return next((run["examples"][:N_EXAMPLES] for run in record["runs"] if run["examples"]), [])


def _title(example: Example) -> str:
    return f"class {example['label']} at {example['confidence']:.0%}, p = {example['p_value']:.3f}"


def _bars(ax: Axes, pairs: list[Line]) -> None:
    for k, method in enumerate(METHODS):
        y = [row + HEIGHT * (k - 1.5) for row in range(len(pairs))]
        ax.barh(y, [p.auroc(method) for p in pairs], 0.9 * HEIGHT, color=COLOURS[method], label=method)
    ax.axvline(0.5, color=MUTED, linewidth=1.2)
    ax.set(xlim=(0, 1), xlabel="AUROC")
    ax.set_yticks(range(len(pairs)), [p.name for p in pairs])
    ax.set_ylim(len(pairs) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def _image(ax: Axes, example: Example) -> None:
    ax.imshow(example["pixels"], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.grid(visible=False)
    ax.set_title(_title(example), fontsize=9, color=INK, fontweight="normal")


def picture(record: AlarmRecord, path: Path) -> Path:
    """Bars by pair on the left, the example images on the right."""
    pairs, shown = lines(record), examples(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": PAPER}):
        canvas = Canvas(figsize=(10.0, 1.2 + 0.62 * len(pairs)), layout="constrained")
        grid = canvas.add_gridspec(N_EXAMPLES, 2 if shown else 1, width_ratios=[3.2, 1] if shown else [1])
        bars = canvas.add_subplot(grid[:, 0])
        _bars(bars, pairs)
        bars.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=len(METHODS), frameon=False)
        for k, example in enumerate(shown):
            _image(canvas.add_subplot(grid[k, 1]), example)
        canvas.savefig(path, dpi=100, metadata={"Software": None})
    return path


def _settings(pairs: list[Line]) -> list[Setting]:
    found = []
    for pair in pairs:
        r, seconds = pair.runs[0], {key: pair.mean(lambda run, key=key: run["seconds"][key]) for key in _TIMED}  # type: ignore[misc]
        rows = f"{r['n_train']:,} / {r['n_held_out']:,} / {r['n_test']:,} rows"
        took = ", ".join(f"{key} {value:.0f} s" for key, value in seconds.items())
        words = f"{r['network']}, {r['parameters']:,} parameters, {r['structure']}; {rows}; {took}"
        found.append(Setting(name=pair.name, value=words))
    return found


_TIMED = ("train", "fit", "tune", "alarm")
