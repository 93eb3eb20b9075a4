"""The page of a study: question, result, and settings. All studies use the same template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas

from lapwing_studies.bench.records import Setting
from lapwing_studies.report.figures import Figure
from lapwing_studies.report.palette import PAPER, STYLE
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline, asset, filled

Paint = Callable[[Any], None]


@dataclass(frozen=True)
class StudyPage:
    title: str
    lead: tuple[str, ...]
    headlines: tuple[Headline, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]
    settings: tuple[Setting, ...]
    command: str


def write_study(page: StudyPage, path: Path) -> Path:
    """Write the page to `path`, creating its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(filled("study.html.j2", asset("common.js"), study=page), encoding="utf-8")
    return path


def write_picture(axes: Sequence[Paint], path: Path, *, shape: tuple[float, float]) -> Path:
    """Panels side by side as one picture, for a documentation page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": PAPER}):
        canvas = Canvas(figsize=shape, layout="constrained")
        for ax, paint in zip(canvas.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
            paint(ax)
        canvas.savefig(path, dpi=100, metadata={"Software": None})
    return path


def markdown(table: Table) -> str:
    """The table as Markdown: text left-aligned, numbers right-aligned, the best of a column in bold."""
    words = [any(isinstance(row[k].sort, str) for row in table.rows) for k in range(len(table.columns))]
    lines = [_line(table.columns), _line(["---" if w else "---:" for w in words])]
    lines += [_line([_marked(cell) for cell in row]) for row in table.rows]
    return "\n".join(lines)


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _marked(cell: Cell) -> str:
    return f"**{cell.text}**" if cell.mark == "best" else cell.text
