"""The record of the conformal study → tables, a figure and a page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, GRID, MAP, MUTED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline
from lapwing_studies.reproduce.conformal import LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.conformal import ConformalRecord, ConformalRun


@dataclass(frozen=True)
class Line:
    """One dataset, over its seeds."""

    runs: tuple[ConformalRun, ...]

    @property
    def name(self) -> str:
        return self.runs[0]["data"]

    def mean(self, value: Callable[[ConformalRun], float]) -> float:
        return fmean(value(run) for run in self.runs)

    @property
    def lengths(self) -> tuple[float, float]:
        """Mean lengths of intervals: scaled by the posterior, and constant."""
        return self.mean(lambda run: run["scaled"]["length"]), self.mean(lambda run: run["constant"]["length"])

    @property
    def ratio(self) -> float:
        scaled, constant = self.lengths
        return scaled / constant

    @property
    def shorter(self) -> bool:
        return self.ratio < 1

    @property
    def spread(self) -> float:
        """Standard error of the ratio of lengths over seeds."""
        ratios = [run["scaled"]["length"] / run["constant"]["length"] for run in self.runs]
        return stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0


def lines(record: ConformalRecord) -> list[Line]:
    names = dict.fromkeys(run["data"] for run in record["runs"])
    return [Line(tuple(run for run in record["runs"] if run["data"] == name)) for name in names]


def page(record: ConformalRecord, command: str) -> StudyPage:
    sets = lines(record)
    n_shorter, asked = sum(s.shorter for s in sets), math.ceil(6 * len(sets) / 8)
    coverage = [fmean(s.mean(lambda run, k=k: run[k]["coverage"]) for s in sets) for k in ("scaled", "constant")]  # type: ignore[misc]
    saved = 1 - math.exp(fmean(math.log(s.ratio) for s in sets))
    return StudyPage(
        title="Intervals with a guarantee",
        lead=(
            f"Split conformal prediction at level {LEVEL:g} on {len(sets)} UCI regressions: intervals mean ± q · std "
            "of the posterior (lw.conformal), and f ± q around the network itself.",
            "Both have the same guarantee and the same held-out rows. Which is shorter depends on whether the "
            "posterior knows where the network errs.",
        ),
        headlines=(
            Headline(f"{n_shorter} of {len(sets)}", f"sets with intervals below constant width (wanted {asked})"),
            Headline(f"{saved:.0%}", "of the length saved, geometric mean over sets"),
            Headline(f"{coverage[0]:.1%} · {coverage[1]:.1%}", "of test targets covered: scaled · constant"),
        ),
        figures=(figure(sets),),
        tables=(table(record),),
        notes=(
            "Lengths are in standard deviations of the training targets. Half of the held-out rows go to lw.tune, the "
            "other half calibrate: rows that tuning has chosen by are not exchangeable with new ones.",
        ),
        settings=tuple(_settings(sets)),
        command=command,
    )


def table(record: ConformalRecord) -> Table:
    rows = []
    for s in lines(record):
        n, exact = s.runs[0]["n_calibrated"], s.runs[0]["exact"]
        covered = [s.mean(lambda run, k=k: run[k]["coverage"]) for k in ("scaled", "constant")]  # type: ignore[misc]
        best = min(s.lengths)
        rows.append(
            (
                Cell(s.name, s.name),
                Cell(f"{n:,}", n),
                Cell(f"{exact:.3f}", exact),
                *(Cell(f"{v:.3f}", v) for v in covered),
                *(Cell(f"{v:.3f}", v, "best" if v == best else "") for v in s.lengths),
                Cell(f"{s.ratio:.3f} ± {s.spread:.3f}", s.ratio),
            )
        )
    columns = (
        "set", "rows", "exact", "scaled covers", "constant covers", "scaled length", "constant length", "ratio",
    )  # fmt: skip
    return Table(
        "lengths",
        f"Coverage and mean length at level {LEVEL:g}",
        f"Means over {record['n_seeds']} seeds; the shorter of two in bold.",
        columns,
        tuple(rows),
        "Exact is ⌈(n + 1) level⌉ / (n + 1) for the n rows calibrated on, the coverage to expect of both.",
    )


def figure(sets: list[Line]) -> Figure:
    shape = (4.6, 1.2 + 0.36 * len(sets))
    return Figure(
        "lengths",
        "Length and coverage",
        "Left of one, the posterior's intervals are shorter than those of constant width.",
        (
            panel("lengths", "Ratio of mean lengths by set.", partial(_ratios, sets=sets), shape=shape),
            panel("coverage", "Coverage of test targets by set.", partial(_coverage, sets=sets), shape=shape),
        ),
        keys=(Key("scaled by the posterior", "dot glm"), Key("constant width", "dot map")),
    )


def _ratios(ax: Axes, sets: list[Line]) -> None:
    ax.axvline(1, color=MUTED, linewidth=1.2)
    ax.barh(range(len(sets)), [s.ratio - 1 for s in sets], 0.6, left=1, color=[GLM if s.shorter else MAP for s in sets])
    for row, s in enumerate(sets):
        ax.plot([s.ratio - s.spread, s.ratio + s.spread], [row, row], color=MUTED, linewidth=1.4)
    ax.set_xlabel("length / constant width")
    _rows(ax, sets)


def _coverage(ax: Axes, sets: list[Line]) -> None:
    ax.axvline(LEVEL, color=MUTED, linewidth=1.2)
    for row, s in enumerate(sets):
        ax.axhline(row, color=GRID, linewidth=0.7, zorder=0)
        ax.plot(s.mean(lambda run: run["constant"]["coverage"]), row + 0.12, "o", color=MAP, markersize=6)
        ax.plot(s.mean(lambda run: run["scaled"]["coverage"]), row - 0.12, "o", color=GLM, markersize=6)
    ax.set(xlim=(0.75, 1.0), xlabel="coverage of test targets")
    _rows(ax, sets)


def _rows(ax: Axes, sets: list[Line]) -> None:
    ax.set_yticks(range(len(sets)), [s.name for s in sets])
    ax.set_ylim(len(sets) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def picture(record: ConformalRecord, path: Path) -> Path:
    sets = lines(record)
    coverage = partial(_with_legend, sets=sets)
    return write_picture([partial(_ratios, sets=sets), coverage], path, shape=(10.0, 1.6 + 0.36 * len(sets)))


def _with_legend(ax: Axes, sets: list[Line]) -> None:
    _coverage(ax, sets)
    for words, colour in (("scaled by the posterior", GLM), ("constant width", MAP)):
        ax.plot([], [], "o", color=colour, label=words)
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2, frameon=False)


def _settings(sets: list[Line]) -> list[Setting]:
    found = []
    for s in sets:
        r = s.runs[0]
        rows = f"{r['n_train']:,} / {r['n_tuned']:,} + {r['n_calibrated']:,} / {r['n_test']:,} rows"
        words = f"MLP 50-50 ReLU, {r['parameters']:,} parameters, {r['structure']}; {rows}"
        found.append(Setting(name=s.name, value=words))
    return found
