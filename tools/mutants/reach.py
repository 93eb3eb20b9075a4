"""Which tests of a file run which lines of the core: measured once."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coverage
import pytest

from .forked import forked
from .items import passes
from .sites import CORE, Site


@dataclass(frozen=True)
class Reach:
    """Seconds of every test that passes, and the tests of every line."""

    seconds: dict[str, float]
    tests: dict[tuple[str, int], frozenset[str]]

    @classmethod
    def read(cls, path: Path) -> Reach:
        found = json.loads(path.read_text(encoding="utf-8"))
        names = list(found["seconds"])
        lines = ((file, line, numbers) for file, lines in found["lines"].items() for line, numbers in lines.items())
        return cls(found["seconds"], {(file, int(line)): frozenset(names[k] for k in ks) for file, line, ks in lines})

    def of(self, site: Site) -> list[str]:
        """The tests that run a site's statement, quickest first."""
        lines = range(site.statement[0], site.statement[1] + 1)
        found = frozenset[str]().union(*(self.tests.get((site.file, line), frozenset()) for line in lines))
        return sorted(found, key=lambda test: (self.seconds[test], test))


def measure(items: Sequence[pytest.Item], package: Path, path: Path) -> None:
    """Run the tests of a file in a child, and write what they reach."""
    said, ended = forked(lambda say: say(_reached(items, package)))
    assert ended and said, f"the tests for {path} did not end"
    path.write_text(json.dumps(said[0]), encoding="utf-8")


def _reached(items: Sequence[pytest.Item], package: Path) -> dict[str, Any]:
    """Seconds of the tests that pass, and per file and line of the core the numbers of those that run it."""
    watch = coverage.Coverage(data_file=None, config_file=False, include=[f"{package}/*"])
    seconds: dict[str, float] = {}
    watch.start()
    for item, following in zip(items, [*items[1:], None], strict=True):
        watch.switch_context(item.nodeid)
        start = time.perf_counter()
        if passes(item, following):
            seconds[item.nodeid] = round(time.perf_counter() - start, 3)
    watch.stop()
    return {"seconds": seconds, "lines": _lines(watch.get_data(), package, {test: k for k, test in enumerate(seconds)})}


def _lines(data: coverage.CoverageData, package: Path, numbers: dict[str, int]) -> dict[str, dict[int, list[int]]]:
    files = {path: str(Path(path).relative_to(package)) for path in data.measured_files()}
    return {
        file: {
            line: sorted(numbers[test] for test in tests if test in numbers)
            for line, tests in data.contexts_by_lineno(path).items()
        }
        for path, file in files.items()
        if file.startswith(CORE)
    }
