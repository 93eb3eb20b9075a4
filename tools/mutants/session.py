"""A pytest session that runs mutants in the place of tests: everything is imported and collected once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import pytest

from . import table
from .reach import Reach, measure
from .sites import Site, core_sites, draw
from .trial import Record, trial

PACKAGE = Path(__file__).parent.parent.parent / "src" / "lapwing"

_PATIENCE = 120.0  # seconds, and ten times what the slowest test takes


@dataclass(frozen=True)
class MutantSession:
    """Plugin of one run: which mutants, and the folder that holds what was found."""

    folder: Path
    n: int
    seed: int

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """File after file: what it reaches, then whom it kills among those that are left."""
        (self.folder / "reach").mkdir(parents=True, exist_ok=True)
        drawn = draw(core_sites(PACKAGE), self.n, self.seed)
        for path, group in groupby(session.items, lambda item: item.path):
            items = {item.nodeid: item for item in group}
            self._against(f"{path.stem}-{_digest(path, items)}", items, drawn)
        known = self._records()
        records = [known[site.key] for site in drawn if site.key in known]
        (self.folder / "table.md").write_text(table.table(records), encoding="utf-8")
        return True

    def _against(self, file: str, items: dict[str, pytest.Item], drawn: Sequence[Site]) -> None:
        known = self._records()
        before = {site: known.get(site.key, Record.untried(site)) for site in drawn}
        left = [site for site in drawn if not before[site].dead and file not in before[site].files]
        reached = self._reached(file, items) if left else Reach({}, {})
        for site in left:
            tests = [test for test in reached.of(site) if test in items]
            patience = _PATIENCE + 10 * max((reached.seconds[test] for test in tests), default=0.0)
            outcome, by = trial(site, [items[test] for test in tests], PACKAGE, patience)
            record = before[site].tried(file, outcome, by, len(tests))
            self._keep(record)
            if tests:
                print(f"{file}: {site.key} {site.file}:{site.line} {record.outcome} {record.by}", flush=True)

    def _reached(self, file: str, items: dict[str, pytest.Item]) -> Reach:
        kept = self.folder / "reach" / f"{file}.json"
        if not kept.exists():
            measure(list(items.values()), PACKAGE, kept)
        return Reach.read(kept)

    def _keep(self, record: Record) -> None:
        with (self.folder / "records.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(record)) + "\n")

    def _records(self) -> dict[str, Record]:
        """The last word on each mutant; what is dead stays so."""
        path = self.folder / "records.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [Record(**row) for row in map(json.loads, lines)]
        return {row.key: row for row in sorted(rows, key=lambda row: row.dead)}


def _digest(test_file: Path, tests: Iterable[str]) -> str:
    """What a measurement belongs to: tests, their file and all of the package. One changes, and it is made anew."""
    paths = [test_file, *sorted(PACKAGE.rglob("*.py"))]
    return hashlib.sha256(b"".join([*(path.read_bytes() for path in paths), *map(str.encode, tests)])).hexdigest()[:8]
