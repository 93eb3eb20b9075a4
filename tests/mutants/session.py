"""A pytest session that runs mutants in the place of tests: everything is imported and collected once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from . import reach, table
from .sites import Site, core_sites, draw
from .trial import Record, trial

PACKAGE = Path(__file__).parent.parent.parent / "src" / "lapwing"

_PATIENCE = 120.0  # seconds; ten times as long as the slowest test, if that is more


@dataclass(frozen=True)
class MutantSession:
    """Plugin of one run: which mutants, and the folder that holds what was found."""

    folder: Path
    n: int
    seed: int
    again: Sequence[str]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        (self.folder / "reach").mkdir(parents=True, exist_ok=True)
        self._measure(session.items)
        self._try(session.items)
        known = self._records()
        records = [known[site.key] for site in self._drawn() if site.key in known]
        (self.folder / "table.md").write_text(table.table(records), encoding="utf-8")
        return True

    def _measure(self, items: Sequence[pytest.Item]) -> None:
        by_file: dict[Path, list[pytest.Item]] = {}
        for item in items:
            by_file.setdefault(item.path, []).append(item)
        for path, some in by_file.items():
            kept = self.folder / "reach" / f"{path.stem}.json"
            if not kept.exists():
                reach.measure(some, PACKAGE, kept)
                print(f"measured what {path.name} reaches", flush=True)

    def _try(self, items: Sequence[pytest.Item]) -> None:
        known, drawn = self._records(), self._drawn()
        reached, named = reach.Reach.read(self.folder / "reach"), {item.nodeid: item for item in items}
        for k, site in enumerate(drawn, 1):
            tests = [test for test in reached.of(site) if test in named]
            if site.key in known and known[site.key].settled(len(tests)) and site.key not in self.again:
                continue
            patience = _PATIENCE + 10 * max((reached.seconds[test] for test in tests), default=0.0)
            record = trial(site, [named[test] for test in tests], PACKAGE, patience)
            with (self.folder / "records.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
            print(f"{k}/{len(drawn)} {site.key} {site.file}:{site.line} {record.outcome} {record.by}", flush=True)

    def _drawn(self) -> list[Site]:
        return draw(core_sites(PACKAGE), self.n, self.seed)

    def _records(self) -> dict[str, Record]:
        """The last word on each mutant."""
        path = self.folder / "records.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {row["key"]: Record(**row) for row in map(json.loads, lines)}
