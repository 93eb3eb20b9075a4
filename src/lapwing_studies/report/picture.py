"""The demo as a single PNG, for a README."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure as Canvas

from lapwing_studies.report import draw
from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, PAPER, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.bench.records import DemoRecord, MoonsRecord

_TITLES = {
    ("MAP", "probability"): "MAP: class probability",
    ("sampled network", "probability"): "sampled network",
    ("GLM", "probability"): "GLM (the default)",
    ("GLM", "epistemic"): "GLM: epistemic part",
}


def write_picture(record: DemoRecord, path: Path, *, dpi: int = 100) -> Path:
    """The regression band above, three two-moons maps below, on the report's background colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": PAPER, "axes.titlesize": 11}):
        canvas = Canvas(figsize=(10.0, 6.6), layout="constrained")
        grid = canvas.add_gridspec(2, 4, height_ratios=[1.35, 1.0])
        _band(canvas.add_subplot(grid[0, :]), record)
        _maps([canvas.add_subplot(grid[1, k]) for k in range(4)], record["moons"])
        canvas.savefig(path, dpi=dpi, format="png", metadata={"Software": None})
    return path


def _band(ax: Axes, record: DemoRecord) -> None:
    regression = record["regression"]
    draw.regression(ax, regression, bands=[regression["tuned"]])
    ax.set_title("A trained network, and how far to trust it", fontsize=13)
    low, high = ax.get_ylim()
    ax.set_ylim(low - 0.1 * (high - low), high + 0.14 * (high - low))  # room for the words
    ax.text(sum(regression["gap"]) / 2, low - 0.05 * (high - low), "no data here", ha="center", color=GLM)
    ax.plot([], [], color=MAP, label="trained network")
    ax.fill_between([], [], [], color=GLM, alpha=0.45, label="95% epistemic")
    ax.fill_between([], [], [], color=GLM, alpha=0.18, label="95% with noise")
    ax.plot([], [], "o", color=INK, markersize=3.2, label="data")
    ax.plot([], [], color=MUTED, linewidth=1.3, linestyle=(0, (4, 3)), label="truth")
    ax.legend(loc="upper center", frameon=False, ncols=5, fontsize=10)


def _maps(axes: list[Axes], record: MoonsRecord) -> None:
    maps = {(m["method"], m["kind"]): m for m in record["maps"]}
    for ax, key in zip(axes, _TITLES, strict=True):
        top = 1.0 if key[1] == "probability" else max(map(max, maps[key]["values"]))
        draw.uncertainty_map(ax, record, maps[key], upper=top)
        ax.set_title(_TITLES[key])
