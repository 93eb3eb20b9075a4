"""Claims as a table: the same four columns on every page."""

from __future__ import annotations

from collections.abc import Sequence

from lapwing_studies.report.tables import Cell, Table
from lapwing_studies.reproduce.claims import Claim


def table_of(
    claims: Sequence[Claim], *, title: str = "Claims", see: str = "What the source says, and what was measured."
) -> Table:
    rows = tuple(tuple(Cell(words, words) for words in (c.says, c.wanted, c.found, c.verdict)) for c in claims)
    return Table("claims", title, see, ("claim", "published or wanted", "measured", "verdict"), rows)
