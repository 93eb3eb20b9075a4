"""Render benchmark rows as a chart and a Markdown table, with the rows of other libraries if there are any."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure

from lapwing_studies.report.palette import GLM, INK, MAP, MUTED, PAPER, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lapwing_studies.bench.case import Row

_PANELS = ("gradient epochs", "forward passes")


def write_chart(rows: list[Row], peers: list[Any], path: Path) -> Path:
    """One panel per unit: a bar for each case, a mark at its goal, a diamond for each other library."""
    groups = [[row for row in rows if row["unit"] == unit and row["ratio"] is not None] for unit in _PANELS]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 1.6 + 0.34 * sum(map(len, groups))), layout="constrained", facecolor=PAPER)
        axes = figure.subplots(2, 1, gridspec_kw={"height_ratios": [max(1, len(g)) for g in groups]})
        for ax, unit, group in zip(axes, _PANELS, groups, strict=True):
            _panel(ax, unit, group, peers)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _panel(ax: Axes, unit: str, rows: list[Row], peers: list[Any]) -> None:
    for k, row in enumerate(rows):
        ax.barh(k, row["ratio"] or 0.0, color=GLM, height=0.62)
        if row["goal"] is not None:
            ax.plot([row["goal"]] * 2, [k - 0.42, k + 0.42], color=INK, linewidth=2.2)
        for peer in _beside(row, peers):
            if peer["ratio"] is not None:
                ax.plot(peer["ratio"], k, "D", color=MAP, markersize=5, zorder=3)
    ax.set_xscale("log")
    ax.set_yticks(range(len(rows)), [f"{row['workload']}  {row['what']}" for row in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_title(unit)
    ax.set_xlabel("bar: Lapwing · line: goal · diamond: other libraries", color=MUTED)


def markdown(rows: list[Row], peers: list[Any]) -> str:
    """The table of the documentation page."""
    lines = [
        "| workload | what | Lapwing | goal | in units of | peak MiB | other libraries |",
        "| --- | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for row in rows:
        goal = "–" if row["goal"] is None else f"{row['goal']:g}"
        cells = [row["workload"], row["what"], _measured(row), goal, row["unit"], _peak(row), _others(row, peers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(row: Row) -> str:
    if row["ratio"] is None:
        return row["note"]
    missed = row["goal"] is not None and row["ratio"] > row["goal"]
    return f"{row['ratio']:.3g}" + (" (missed)" if missed else "")


def _peak(row: Row) -> str:
    if row["peak_mib"] is None:
        return "–"
    missed = row["goal_mib"] is not None and row["peak_mib"] > row["goal_mib"]
    return f"{row['peak_mib']:.0f}" + (f" (goal {row['goal_mib']:g}: missed)" if missed else "")


def _others(row: Row, peers: list[Any]) -> str:
    said = []
    for peer in _beside(row, peers):
        value = f"{peer['ratio']:.3g}" if peer["ratio"] is not None else "cannot run"
        said.append(f"{peer['library']} {value}" + (f" ({peer['note']})" if peer["note"] else ""))
    return "; ".join(said) or "–"


def _beside(row: Row, peers: list[Any]) -> list[Any]:
    return [p for p in peers if (p["workload"], p["case"]) == (row["workload"], row["case"])]
