"""The record of the conformal study → tables, a figure and a page."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import best, mean, number, over_seeds, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, MAP, MUTED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.conformal import LEVEL, ratios
from lapwing_studies.reproduce.means import grouped, standard_error
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("scaled", "constant")
Sets = dict[str, list[Record]]


def page(record: Record) -> StudyPage:
    sets = grouped(record["runs"], "data")
    saved = 1 - math.exp(fmean(math.log(_ratio(runs)) for runs in sets.values()))
    shape = (5.0, 1.4 + 0.36 * len(sets))
    return StudyPage(
        title="Intervals with a guarantee",
        lead=(
            f"Split conformal prediction at level {LEVEL:g} on {len(sets)} UCI regressions: intervals mean ± q · std "
            "of the posterior (lw.conformal), and f ± q around the network itself.",
            "Both have the same guarantee and the same held-out rows. Which is shorter depends on whether the "
            "posterior knows where the network errs.",
        ),
        figures=(
            Figure.of(
                "lengths",
                "Length and coverage",
                "Left of one, the posterior's intervals are shorter than those of constant width.",
                (
                    Panel("lengths", "Ratio of mean lengths by set.", partial(_ratios, sets=sets), shape),
                    Panel("coverage", "Coverage of test targets by set.", partial(_coverage, sets=sets), shape),
                ),
                keys=(Key("scaled by the posterior", "dot glm"), Key("constant width", "dot map")),
            ),
        ),
        tables=(lengths(record),),
        notes=(
            f"{saved:.0%} of the length is saved, geometric mean over sets. Lengths are in standard deviations of the "
            "training targets. Half of the held-out rows go to lw.tune, the other half calibrate: rows that tuning "
            "has chosen by are not exchangeable with new ones.",
        ),
        settings={name: _setting(runs[0]) for name, runs in sets.items()},
    )


def _length(runs: list[Record], kind: str) -> float:
    return fmean(run[kind]["length"] for run in runs)


def _ratio(runs: list[Record]) -> float:
    return _length(runs, "scaled") / _length(runs, "constant")


def lengths(record: Record) -> Table:
    rows = [
        (name, number(runs[0]["n_calibrated"], "{:,}"), number(runs[0]["exact"]),
         *(mean([run[kind]["coverage"] for run in runs]) for kind in KINDS),
         *best([number(_length(runs, kind)) for kind in KINDS]),
         number(_ratio(runs), f"{{:.3f}} ± {standard_error(ratios(runs)):.3f}"))
        for name, runs in grouped(record["runs"], "data").items()
    ]  # fmt: skip
    return table(
        "lengths", f"Coverage and mean length at level {LEVEL:g}",
        f"{over_seeds(record)} The shorter of two in bold.",
        ("set", "rows", "exact", "scaled covers", "constant covers", "scaled length", "constant length", "ratio"), rows,
        "Exact is ⌈(n + 1) level⌉ / (n + 1) for the n rows calibrated on, the coverage to expect of both.",
    )  # fmt: skip


def _ratios(ax: Axes, sets: Sets) -> None:
    found = [_ratio(runs) for runs in sets.values()]
    ax.axvline(1, color=MUTED, linewidth=1.2)
    ax.barh(range(len(sets)), [r - 1 for r in found], 0.6, left=1, color=[GLM if r < 1 else MAP for r in found])
    for row, (ratio, runs) in enumerate(zip(found, sets.values(), strict=True)):
        error = standard_error(ratios(runs))
        ax.plot([ratio - error, ratio + error], [row, row], color=MUTED, linewidth=1.4)
    axes.rows(ax, list(sets))
    ax.set_xlabel("length / constant width")


def _coverage(ax: Axes, sets: Sets) -> None:
    ax.axvline(LEVEL, color=MUTED, linewidth=1.2)
    for kind, colour, up in (("constant", MAP, 0.12), ("scaled", GLM, -0.12)):
        found = [fmean(run[kind]["coverage"] for run in runs) for runs in sets.values()]
        ax.plot(found, [row + up for row in range(len(sets))], "o", color=colour, markersize=6)
    axes.rows(ax, list(sets))
    ax.set(xlim=(0.75, 1.0), xlabel="coverage of test targets")


def _setting(run: Record) -> str:
    rows = f"{run['n_train']:,} / {run['n_tuned']:,} + {run['n_calibrated']:,} / {run['n_test']:,} rows"
    return f"MLP 50-50 ReLU, {run['parameters']:,} parameters, {run['structure']}; {rows}"
