"""The batch-normed network's record → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.draw import TWO_SIDED_95
from lapwing_studies.report.figures import Figure, Key, panel
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, SAMPLED
from lapwing_studies.report.study import StudyPage, write_picture
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.reproduce.batchnorm import BatchNormRecord, BatchNormRow, BatchNormRun

COLOURS = {"trained weights": SAMPLED, "linear mode": GLM}
COLUMNS = (
    ("prior precision", "precision"),
    ("noise", "noise_std"),
    ("NLL everywhere", "nll"),
    ("NLL on the data", "nll_data"),
    ("NLL in the gaps", "nll_gap"),
    ("epistemic std in the gaps", "gap_std"),
)


def page(record: BatchNormRecord, command: str) -> StudyPage:
    run = record["runs"][0]
    classic, one, linear = (_mean([r["rows"][k] for r in record["runs"]]) for k in (0, 1, -1))
    return StudyPage(
        title="What batch normalisation does to the evidence",
        lead=(
            f"A network 1-50-50-1 with BatchNorm ({run['weights']:,} weights), stopped early, on data with two gaps. "
            "The classic evidence looks at the trained weights, which are no mode of anything; the linear model's own "
            "mode is one.",
        ),
        headlines=(
            Headline(
                f"{one['precision'] / classic['precision']:.0f} times",
                "smaller is the one precision that the classic evidence picks (geometric mean over seeds)",
            ),
            Headline(
                f"{classic['nll']:.2f} → {linear['nll']:.2f}", "test NLL everywhere: trained weights → linear mode"
            ),
            Headline(
                f"{classic['gap_std']:.2f} → {linear['gap_std']:.2f}",
                "epistemic standard deviation in the gaps, in units of the target's",
            ),
        ),
        figures=(band_figure(run),),
        tables=(table(record),),
        notes=(
            "The same network and the same curvature in all rows: only the prior precision and the noise differ. The "
            "predictive mean is the network's own.",
        ),
        settings=_settings(record),
        command=command,
    )


def _mean(rows: list[BatchNormRow]) -> dict[str, float]:
    means = {key: fmean(row[key] for row in rows) for _, key in COLUMNS}  # type: ignore[literal-required]
    means["precision"] = float(np.exp(fmean(float(np.log(row["precision"])) for row in rows)))
    return means


def table(record: BatchNormRecord) -> Table:
    rows = []
    for k, row in enumerate(record["runs"][0]["rows"]):
        means = _mean([run["rows"][k] for run in record["runs"]])
        words = [Cell(w, w) for w in (row["evidence"], row["groups"])]
        numbers = [Cell(f"{means[key]:.3g}", means[key]) for _, key in COLUMNS[1:]]
        rows.append((*words, Cell(_precisions(record, k), means["precision"]), *numbers))
    return Table(
        "batchnorm",
        "Three ways to tune one network",
        f"Means over {record['n_seeds']} seeds; the geometric mean of the precision where there is one.",
        ("evidence at", "precisions", *(heading for heading, _ in COLUMNS)),
        tuple(rows),
        "“normalised” is one precision for each normalised group of weights and one for the rest: the smallest and "
        "the largest are shown. A huge one means that the evidence switches its group off.",
    )


def _precisions(record: BatchNormRecord, k: int) -> str:
    found = [p for run in record["runs"] for p in run["rows"][k]["precisions"]]
    if len(record["runs"][0]["rows"][k]["precisions"]) == 1:
        return f"{np.exp(np.log(found).mean()):.3g}"
    return f"{min(found):.1g} … {max(found):.1g}"


def band_figure(run: BatchNormRun) -> Figure:
    shown = (run["rows"][0], run["rows"][-1])
    panels = tuple(
        panel(
            f"band-{k}",
            f"Predictive band with the evidence at the {row['evidence']}: NLL {row['nll']:.2f}.",
            lambda ax, row=row: _band(ax, run, row),  # type: ignore[misc]
            shape=(5.0, 3.6),
        )
        for k, row in enumerate(shown)
    )
    return Figure(
        "band",
        "The same network, tuned twice",
        "On the data both bands are narrow. Between them the classic evidence leaves everything possible.",
        panels,
        "The band holds 95% of new points.",
        (Key("data", "dot"), Key("truth", "dash muted"), Key("trained network", "line map")),
    )


def _band(ax: Axes, run: BatchNormRun, row: BatchNormRow) -> None:
    x, mean, half = run["grid"], np.asarray(row["band"]["mean"]), TWO_SIDED_95 * np.asarray(row["band"]["std"])
    colour = COLOURS[row["evidence"]]
    ax.fill_between(x, mean - half, mean + half, color=colour, alpha=0.25, linewidth=0)
    ax.plot(x, run["truth"], color=MUTED, linewidth=1.3, linestyle=(0, (4, 3)))
    ax.plot(x, mean, color=MAP)
    ax.plot(run["train_x"], run["train_y"], "o", color=INK, markersize=2.2, alpha=0.6)
    ax.set(xlim=(min(x), max(x)), ylim=(-6.5, 9.5), xlabel="x", ylabel="y")
    ax.set_title(f"evidence at the {row['evidence']}", color=colour)
    ax.set_title(f"NLL {row['nll']:.2f}", loc="right", color=MUTED, fontsize=10, fontweight="normal")


def picture(record: BatchNormRecord, path: Path) -> Path:
    """Both bands side by side."""
    run = record["runs"][0]
    return write_picture([partial(_band, run=run, row=run["rows"][k]) for k in (0, -1)], path, shape=(10.0, 3.6))


def _settings(record: BatchNormRecord) -> tuple[Setting, ...]:
    run = record["runs"][0]
    return (
        Setting(name="network", value=f"1-50-50-1, BatchNorm, ReLU, no biases: {run['weights']:,} weights"),
        Setting(name="with the norms' scales and shifts", value=f"{run['parameters']:,} parameters"),
        Setting(name="data", value=f"{run['n_train']} training points, x − x²/10 + cos(πx/2) + 0.25 ε"),
        Setting(name="test", value="points everywhere between −1 and 5, in the gaps as well"),
        Setting(name="posterior", value="full GGN over all parameters"),
        Setting(name="seeds", value=str(record["n_seeds"])),
    )
