"""The record of the gap example → tables, a figure and a page."""

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

    from lapwing_studies.reproduce.subnetwork import SubnetworkRecord, SubnetworkRow, SubnetworkRun

WORDS = {
    "swag": "variance, SWAG",
    "variance": "variance, Laplace",
    "functional": "share in the outputs' variance",
    "magnitude": "magnitude",
    "random": "random",
}
SHOWN = (("all weights", 2600), ("swag", 1300), ("swag", 78), ("random", 78), ("last layer", 50), ("diagonal", 2600))


def page(record: SubnetworkRecord, command: str) -> StudyPage:
    run = record["runs"][0]
    kept = {key: _mean_share(record, *key) for key in (("swag", 1300), ("swag", 78), ("random", 78))}
    return StudyPage(
        title="Which weights carry the doubt",
        lead=(
            f"A network 1-50-50-1 ({run['weights']:,} weights) on data with two gaps. Prior and noise are the same for "
            "all: only the weights that are random differ, and the structure of their covariance.",
        ),
        headlines=(
            Headline(f"{kept['swag', 1300]:.0%}", "of the doubt in the gaps is left by half of the weights"),
            Headline(f"{kept['swag', 78]:.0%}", "by 3% of them, those that vary most along further training (SWAG)"),
            Headline(f"{kept['random', 78]:.0%}", "by as many random ones"),
        ),
        figures=(band_figure(run),),
        tables=(table(record),),
        notes=(
            "A subnetwork is the conditional posterior given the other weights: its doubt is never above that of all "
            "weights together.",
        ),
        settings=_settings(record),
        command=command,
    )


def _mean_share(record: SubnetworkRecord, method: str, k: int) -> float:
    """Standard deviation in the gaps relative to that of the full posterior, mean over seeds."""
    shares = [_row(run, method, k)["gap_std"] / _row(run, "all weights", 2600)["gap_std"] for run in record["runs"]]
    return fmean(shares)


def _row(run: SubnetworkRun, method: str, k: int) -> SubnetworkRow:
    return next(row for row in run["rows"] if row["method"] == method and row["k"] == k)


def table(record: SubnetworkRecord) -> Table:
    rows = []
    for row in record["runs"][0]["rows"]:
        key = row["method"], row["k"]
        same = [_row(run, *key) for run in record["runs"]]
        gap, data = (fmean(r[where] for r in same) for where in ("gap_std", "data_std"))
        share, nll = _mean_share(record, *key), fmean(r["nll_gap"] for r in same)
        words = WORDS.get(row["method"], row["method"])
        rows.append(
            (
                Cell(words, words),
                Cell(f"{row['k']:,}", row["k"]),
                Cell(f"{gap:.3f}", gap),
                Cell(f"{data:.3f}", data),
                Cell(f"{gap / data:.2f}", gap / data),
                Cell(f"{share:.0%}", share),
                Cell(f"{nll:.2f}", nll),
            )
        )
    return Table(
        "subnetwork",
        "Doubt by choice of weights",
        f"Epistemic standard deviation in units of the target's; means over {record['n_seeds']} seeds.",
        ("chosen by", "weights", "in the gaps", "on the data", "ratio", "of all weights'", "NLL in the gaps"),
        tuple(rows),
        "Random weights: means over five draws. NLL is that of the noiseless curve. The diagonal posterior has all "
        "weights and no correlations: it doubts everywhere alike.",
    )


def band_figure(run: SubnetworkRun) -> Figure:
    panels = tuple(
        panel(
            f"band-{k}",
            f"Predictive band of {_title(*shown)}.",
            partial(_band, run=run, row=_row(run, *shown)),
            shape=(4.2, 3.2),
        )
        for k, shown in enumerate(SHOWN)
    )
    return Figure(
        "band",
        "The same network, with fewer and fewer weights left to chance",
        "Half of the weights keep the band in the gaps; 3% keep a part of it, the last layer next to nothing.",
        panels,
        "The band holds 95% of new points.",
        (Key("data", "dot"), Key("truth", "dash muted"), Key("trained network", "line map")),
    )


def _title(method: str, k: int) -> str:
    words = {"all weights": "all weights", "diagonal": "diagonal", "last layer": "last layer"}
    return words.get(method) or f"{k:,} weights, {'SWAG' if method == 'swag' else method}"


def _band(ax: Axes, run: SubnetworkRun, row: SubnetworkRow) -> None:
    x, mean, half = run["grid"], np.asarray(row["band"]["mean"]), TWO_SIDED_95 * np.asarray(row["band"]["std"])
    colour = GLM if row["method"] in ("all weights", "swag") else SAMPLED
    ax.fill_between(x, mean - half, mean + half, color=colour, alpha=0.25, linewidth=0)
    ax.plot(x, run["truth"], color=MUTED, linewidth=1.3, linestyle=(0, (4, 3)))
    ax.plot(x, mean, color=MAP)
    ax.plot(run["train_x"], run["train_y"], "o", color=INK, markersize=1.6, alpha=0.35)
    ax.set(xlim=(min(x), max(x)), ylim=(-3.5, 5.5), xlabel="x", ylabel="y")
    ax.set_title(_title(row["method"], row["k"]), color=colour)


def picture(record: SubnetworkRecord, path: Path) -> Path:
    """Four of the bands side by side."""
    run = record["runs"][0]
    paints = [partial(_band, run=run, row=_row(run, *shown)) for shown in SHOWN[:4]]
    return write_picture(paints, path, shape=(15.0, 3.4))


def _settings(record: SubnetworkRecord) -> tuple[Setting, ...]:
    run = record["runs"][0]
    return (
        Setting(name="network", value=f"1-50-50-1, ReLU: {run['weights']:,} weights; the biases stay as trained"),
        Setting(name="data", value=f"{run['n_train']} training points, x − x²/10 + cos(πx/2) + 0.25 ε"),
        Setting(
            name="prior and noise", value="by the evidence of the full posterior over all parameters, for all rows"
        ),
        Setting(name="seeds", value=str(record["n_seeds"])),
    )
