"""Every claim of every source beside what was measured, made from the records in docs/records: docs/results.md, and the
table of claims on the page of each study.

`python tools/results_page.py` writes them; a test fails when one is stale. Given the folder of a study that was run
(`lapwing reproduce STUDY --out FOLDER` writes FOLDER/STUDY), it first keeps its claims as a record and its picture in
docs/assets, and brings the tables of the study's page up to date that have the same columns.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lapwing_studies.reproduce import registry
from lapwing_studies.reproduce.claims import FAILS, HOLDS, OPEN, VERDICTS, KeptClaims

DOCS = Path(__file__).parent.parent / "docs"
RECORDS, PAGE = DOCS / "records", DOCS / "results.md"
START, END = "<!-- claims: made by tools/results_page.py -->", "<!-- end of claims -->"
KEYS = {"study", "paper", "tier", "seeds", "command", "claims"}
ROW = {"claim", "published", "measured", "verdict"}


def records(folder: Path = RECORDS) -> list[KeptClaims]:
    """In the order of the registry; raises if a record has other contents."""
    found = {path.stem: _checked(json.loads(path.read_text("utf-8")), path) for path in sorted(folder.glob("*.json"))}
    unknown = set(found) - set(registry.names())
    if unknown:
        raise ValueError(f"{folder}: no study is called {', '.join(sorted(unknown))}.")
    return [found[name] for name in registry.names() if name in found]


def _checked(record: Any, path: Path) -> KeptClaims:
    if set(record) != KEYS or record["study"] != path.stem or record["tier"] not in registry.TIERS:
        raise ValueError(f"{path}: expected the record of {path.stem} with {sorted(KEYS)}.")
    for row in record["claims"]:
        if set(row) != ROW or row["verdict"] not in VERDICTS:
            raise ValueError(f"{path}: {row} needs {sorted(ROW)}, and a verdict out of {VERDICTS}.")
    return record  # type: ignore[no-any-return]


def page(found: Sequence[KeptClaims]) -> str:
    counts = Counter(row["verdict"] for record in found for row in record["claims"])
    papers = sorted(dict.fromkeys(record["paper"] for record in found), key=lambda paper: paper == registry.OWN)
    lines = [
        "# Every claim, measured",
        "",
        "What the sources of Lapwing claim, and its own goals, beside what was measured on a CPU. Of "
        f"{sum(counts.values())} claims {counts[HOLDS]} hold, {counts[FAILS]} do not, and {counts[OPEN]} cannot be "
        "tested here, or are not yet.",
        "",
        "A study's page says how it was measured, and what differs from the paper. *Standard* runs take minutes to "
        "hours on two cores; *quick* ones show a direction, no more. `lapwing reproduce --list` names all studies.",
        "",
    ]
    for paper in papers:
        lines += [f"## {paper[0].upper() + paper[1:]}", ""]
        for record in (r for r in found if r["paper"] == paper):
            lines += [*_study(record), ""]
    made = "Made by `python tools/results_page.py` from the records in `docs/records`, which the studies write."
    return "\n".join([*lines, made]) + "\n"


def _study(record: KeptClaims) -> list[str]:
    shows = registry.entry(record["study"]).shows
    return [f"`{record['command']}`: [{shows}]({page_of(record)}); {_size(record)}.", "", *_table(record)]


def _size(record: KeptClaims) -> str:
    return f"{record['tier']}, {record['seeds']} {'seed or split' if record['seeds'] == 1 else 'seeds or splits'}"


def _table(record: KeptClaims) -> list[str]:
    lines = ["| claim | published or wanted | measured | verdict |", "| --- | --- | --- | --- |"]
    for row in record["claims"]:
        cells = (row["claim"], row["published"], row["measured"], _mark(row["verdict"]))
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return lines


def on_page(record: KeptClaims) -> str:
    """The claims as they stand on the page of their study."""
    return "\n".join([START, "", f"`{record['command']}` ({_size(record)}):", "", *_table(record), "", END])


def with_claims(text: str, record: KeptClaims) -> str:
    """A study's page with its present claims; raises if it has no place for them."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page_of(record)} needs the lines {START!r} and {END!r}: the table of claims goes there.")
    return before + on_page(record) + after


def page_of(record: KeptClaims) -> str:
    return f"reproduce-{record['study']}.md"


def _mark(verdict: str) -> str:
    return {HOLDS: verdict, FAILS: f"**{verdict}**", OPEN: f"*{verdict}*"}[verdict]


def keep(folder: Path) -> None:
    record = json.loads((folder / "claims.json").read_text("utf-8"))
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (RECORDS / f"{record['study']}.json").write_text(text, encoding="utf-8")
    shutil.copyfile(folder / "picture.png", DOCS / "assets" / f"{record['study']}.png")
    path = DOCS / page_of(record)
    tables = (folder / "tables.md").read_text("utf-8")
    path.write_text(with_tables(path.read_text("utf-8"), tables), encoding="utf-8")


TABLE = re.compile(r"^\|.*\|\n\|[ |:-]+\|\n(?:\|.*\|\n)*", re.MULTILINE)


def with_tables(text: str, tables: str) -> str:
    """The page with the tables that have the columns of one of its own, in the order in which they occur."""
    found: dict[str, list[str]] = {}
    for table in TABLE.findall(tables):
        found.setdefault(_columns(table), []).append(table)

    def newer(match: re.Match[str]) -> str:
        same = found.get(_columns(match[0]), [])
        return same.pop(0) if same else match[0]

    return TABLE.sub(newer, text)


def _columns(table: str) -> str:
    return table.split("\n", 1)[0]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        keep(Path(argument))
    found = records()
    PAGE.write_text(page(found), encoding="utf-8")
    for record in found:
        path = DOCS / page_of(record)
        path.write_text(with_claims(path.read_text("utf-8"), record), encoding="utf-8")
