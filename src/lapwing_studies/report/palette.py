"""Colours of the report, and conversion of matplotlib figures to SVG that follows the page's light or dark theme.

Figures are drawn with the light colours below. In the SVG each is replaced by a CSS variable of the same name, which
the page defines; a PNG keeps the light colours. The hues can be distinguished by colour-blind readers.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1b2430", "#5b6675", "#d9dee5", "#fefefd"
MAP, SAMPLED, GLM = "#c2570c", "#8b3fa8", "#0b7285"
OUTSIDE = "#9aa3ad"
LIGHT = {
    "ink": INK,
    "muted": MUTED,
    "grid": GRID,
    "paper": PAPER,
    "map": MAP,
    "sampled": SAMPLED,
    "glm": GLM,
    "outside": OUTSIDE,
}
DARK = {
    "ink": "#e8ecf1",
    "muted": "#9fabb9",
    "grid": "#323c49",
    "paper": "#151b23",
    "map": "#f59e4c",
    "sampled": "#c792ea",
    "glm": "#38c5d6",
    "outside": "#76818e",
}
METHOD_COLOURS = {"MAP": MAP, "sampled network": SAMPLED, "GLM": GLM}

STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "image.interpolation": "bilinear",
    # Text stays text, so that it can be searched and selected; ids are the same in every run.
    "svg.fonttype": "none",
    "svg.hashsalt": "lapwing",
}


def to_svg(figure: Figure, *, name: str, title: str) -> str:
    """The figure as an `<svg>` element: no prolog, no metadata, ids prefixed by `name`, colours as CSS variables.

    Ids are prefixed because several figures share a page, and equal ids of clip paths would conflict.
    """
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    for key, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{key})")
    return _label(svg, name=name, title=title)


def _label(svg: str, *, name: str, title: str) -> str:
    """Add a label for screen readers, and remove the fixed size (the view box keeps the aspect ratio)."""
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    escaped = title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'{opening} role="img" aria-labelledby="{name}-title"><title id="{name}-title">{escaped}</title>{rest}'
