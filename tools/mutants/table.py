"""Records as a table and figures for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .trial import KILLED, Record

_WIDEST = 70


def table(records: Sequence[Record]) -> str:
    """Markdown: the figures, then one row per mutant."""
    every, killed = Counter(r.kind for r in records), Counter(r.kind for r in records if r.dead)
    lines = [f"{killed.total()} of {len(records)} killed.", "", "| kind | mutants | killed |", "| --- | --- | --- |"]
    lines += [f"| {kind} | {n} | {killed[kind]} |" for kind, n in sorted(every.items())]
    lines += ["", "| place | kind | stands | planted | outcome |", "| --- | --- | --- | --- | --- |"]
    lines += [_row(record) for record in sorted(records, key=lambda r: (r.file, r.line, r.kind))]
    return "\n".join(lines) + "\n"


def _row(record: Record) -> str:
    by = f"`{record.by.removeprefix('tests/')}`" if record.outcome == KILLED else f"**{record.outcome}**"
    cells = f"{record.file} `{record.function}`", record.kind, _code(record.before), _code(record.after), by
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    text = " ".join(text.split())
    text = text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"
    return "`" + text.replace("|", "\\|") + "`"
