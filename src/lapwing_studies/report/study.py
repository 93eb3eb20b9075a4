"""The page of a study: claims, result and settings. All studies use the same template, and the same picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from lapwing_studies.report.figures import Figure, Key, Panel
from lapwing_studies.report.palette import INK, LIGHT, PAPER, STYLE
from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.report.template import Headline, asset, filled
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.registry import Entry
from lapwing_studies.reproduce.study import Record


@dataclass(frozen=True)
class StudyPage:
    """What is particular to a study; `study_page` adds the rest. `cover`: rows of panels of the picture for a
    documentation page, by default those of the first figure."""

    title: str
    lead: tuple[str, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    headlines: tuple[Headline, ...] = ()
    cover: tuple[tuple[Panel, ...], ...] = ()
    command: str = ""


def study_page(entry: Entry, record: Record, command: str) -> StudyPage:
    """The study's own page, with the claims of its source first; they are the headlines where it has no others."""
    page, claims = entry.report.page(record), entry.claims(record)
    headlines = page.headlines or tuple(Headline(c.found, f"{c.says}: {c.verdict}") for c in claims[:3])
    tables = (claims_table(claims), *page.tables) if claims else page.tables
    settings = {**page.settings, "tier": record["effort"], "seeds or splits": str(record["n_seeds"])}
    return replace(page, headlines=headlines, tables=tables, settings=settings, command=command)


def claims_table(claims: list[Claim]) -> Table:
    rows = tuple(tuple(Cell(words, words) for words in (c.says, c.wanted, c.found, c.verdict)) for c in claims)
    columns = ("claim", "published or wanted", "measured", "verdict")
    return Table("claims", "Claims", "What the source says, and what was measured.", columns, rows)


def write_study(page: StudyPage, path: Path) -> Path:
    """Write the page to `path`, creating its folder; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(filled("study.html.j2", asset("common.js"), study=page), encoding="utf-8")
    return path


def write_cover(page: StudyPage, path: Path) -> Path:
    """The picture for a documentation page: panels side by side, with the legend of the first figure."""
    rows = page.cover or (page.figures[0].drawn,)
    width = max(sum(panel.shape[0] for panel in row) for row in rows)
    heights = [max(panel.shape[1] for panel in row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({**STYLE, "figure.facecolor": PAPER}):
        canvas = Canvas(figsize=(width, sum(heights)), layout="constrained")
        parts = canvas.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, row in zip(parts, rows, strict=True):
            axes = part.subplots(1, len(row), width_ratios=[panel.shape[0] for panel in row], squeeze=False)[0]
            for ax, panel in zip(axes, row, strict=True):
                panel.paint(ax)
        if keys := page.figures[0].keys:
            handles = [_handle(key) for key in keys]
            parts[0].legend(handles=handles, loc="outside lower center", ncols=len(keys), frameon=False)
        canvas.savefig(path, dpi=100, metadata={"Software": None})
    return path


def _handle(key: Key) -> Line2D:
    """A legend entry that looks like the page's: its kind, and the colour of the same name."""
    kind, *words = key.look.split()
    colour = next((LIGHT[word] for word in words if word in LIGHT), INK)
    looks: dict[str, dict[str, Any]] = {
        "dot": {"marker": "o", "linestyle": ""},
        "dash": {"linestyle": "--"},
        "fill": {"linewidth": 7, "alpha": 0.4},
    }
    return Line2D([], [], color=colour, label=key.label, **looks.get(kind, {}))


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
