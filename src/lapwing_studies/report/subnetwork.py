"""The record of the gap example → tables, a figure and a page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lapwing_studies.report import axes
from lapwing_studies.report.cells import mean, number, over_seeds, table
from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import GLM, SAMPLED
from lapwing_studies.report.study import StudyPage
from lapwing_studies.report.tables import Table
from lapwing_studies.reproduce.means import mean_of, where
from lapwing_studies.reproduce.study import Record
from lapwing_studies.reproduce.subnetwork import kept, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {
    "swag": "variance, SWAG",
    "variance": "variance, Laplace",
    "functional": "share in the outputs' variance",
}
SHOWN = (("all weights", 2600), ("swag", 1300), ("swag", 78), ("random", 78), ("last layer", 50), ("diagonal", 2600))


def page(record: Record) -> StudyPage:
    run = record["runs"][0]
    panels = [
        Panel(f"band-{n}", f"Predictive band of {_title(method, k)}.",
              partial(_band, run=run, row=where(run["rows"], method=method, k=k)[0]), (4.2, 3.4))
        for n, (method, k) in enumerate(SHOWN)
    ]  # fmt: skip
    return StudyPage(
        title="Which weights carry the doubt",
        lead=(
            f"A network 1-50-50-1 ({run['weights']:,} weights) on data with two gaps. Prior and noise are the same for "
            "all: only the weights that are random differ, and the structure of their covariance.",
        ),
        figures=(
            Figure.of(
                "band",
                "The same network, with fewer and fewer weights left to chance",
                "Half of the weights keep the band in the gaps; 3% keep a part of it, the last layer next to nothing.",
                panels,
                note="The band holds 95% of new points.",
                keys=(Key("data", "dot"), Key("truth", "dash muted"), Key("trained network", "line map")),
            ),
        ),
        tables=(by_choice(record),),
        notes=(
            "A subnetwork is the conditional posterior given the other weights: its doubt is never above that of all "
            "weights together.",
            "The paper shows this example as a picture, without numbers; the limits are ours.",
        ),
        settings={
            "network": f"1-50-50-1, ReLU: {run['weights']:,} weights; the biases stay as trained",
            "data": f"{run['n_train']} training points, x − x²/10 + cos(πx/2) + 0.25 ε",
            "prior and noise": "by the evidence of the full posterior over all parameters, for all rows",
        },
        cover=(tuple(panels[:4]),),
    )


def by_choice(record: Record) -> Table:
    rows = []
    for method, k in ((row["method"], row["k"]) for row in record["runs"][0]["rows"]):
        same = rows_of(record, method, k)
        gap, data = (mean_of(same, key) for key in ("gap_std", "data_std"))
        rows.append((
            WORDS.get(method, method), number(k, "{:,}"), number(gap), number(data), number(gap / data, "{:.2f}"),
            mean(kept(record, method, k), "{:.1%}"), mean([row["nll_gap"] for row in same], "{:.2f}"),
        ))  # fmt: skip
    return table(
        "subnetwork", "Doubt by choice of weights",
        f"Epistemic standard deviation in units of the target's. {over_seeds(record)}",
        ("chosen by", "weights", "in the gaps", "on the data", "ratio", "of all weights'", "NLL in the gaps"), rows,
        "Random weights: means over five draws. NLL is that of the noiseless curve. The diagonal posterior has all "
        "weights and no correlations: it doubts everywhere alike.",
    )  # fmt: skip


def _title(method: str, k: int) -> str:
    chosen = {"swag": "SWAG", "random": "random"}
    return f"{k:,} weights, {chosen[method]}" if method in chosen else method


def _band(ax: Axes, run: Record, row: Record) -> None:
    colour = GLM if row["method"] in ("all weights", "swag") else SAMPLED
    axes.band(ax, run, row, colour, (-3.5, 5.5), size=1.6)
    ax.set_title(_title(row["method"], row["k"]), color=colour)
