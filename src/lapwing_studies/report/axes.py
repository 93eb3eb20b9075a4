"""Painters that several studies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lapwing_studies.report.draw import TWO_SIDED_95
from lapwing_studies.report.palette import GRID, INK, MAP, MUTED
from lapwing_studies.reproduce.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rows(ax: Axes, names: Sequence[str]) -> None:
    """A row for each name, the first on top, with a thin line that marks are drawn on."""
    for row in range(len(names)):
        ax.axhline(row, color=GRID, linewidth=0.7, zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)


def log_x(ax: Axes) -> None:
    """A logarithmic axis with plain numbers at its ticks."""
    ax.set_xscale("log")
    ax.grid(axis="x", which="both", color=MUTED, alpha=0.2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")


def bars(ax: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str], shown: Sequence[str]) -> None:
    """Horizontal bars from the top down, each with its number."""
    at = range(len(names))
    ax.barh(at, values, color=colours, height=0.65, alpha=0.85)
    for k in at:
        ax.text(values[k], k, f" {shown[k]}", va="center")
    ax.set_yticks(at, names)
    ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 1.2 * max(values)))
    ax.grid(axis="y", visible=False)


def band(ax: Axes, run: Record, row: Record, colour: str, limits: tuple[float, float], size: float = 2.0) -> None:
    """A network on a line with the 95% band of new points, the data and the truth."""
    x, mean, half = run["grid"], np.asarray(row["band"]["mean"]), TWO_SIDED_95 * np.asarray(row["band"]["std"])
    ax.fill_between(x, mean - half, mean + half, color=colour, alpha=0.25, linewidth=0)
    ax.plot(x, run["truth"], color=MUTED, linewidth=1.3, linestyle=(0, (4, 3)))
    ax.plot(x, mean, color=MAP)
    ax.plot(run["train_x"], run["train_y"], "o", color=INK, markersize=size, alpha=0.5)
    ax.set(xlim=(min(x), max(x)), ylim=limits, xlabel="x", ylabel="y")
