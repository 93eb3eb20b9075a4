"""One mutant against the tests that reach it: the first that fails, and passes without the mutant, kills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from .forked import forked
from .items import passes
from .planting import plant
from .sites import Site

KILLED, TIMEOUT, SURVIVED, UNREACHED = "killed", "timeout", "survived", "not reached"


@dataclass(frozen=True)
class Record:
    """What became of a mutant."""

    key: str
    file: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    outcome: str
    by: str = ""  # the test that failed, or did not end
    n_tests: int = 0  # that reach it, of the test files below
    files: tuple[str, ...] = ()

    @classmethod
    def untried(cls, site: Site) -> Record:
        return cls(site.key, site.file, site.function, site.line, site.kind, site.before, site.after, UNREACHED)

    @property
    def dead(self) -> bool:
        return self.outcome in (KILLED, TIMEOUT)

    def tried(self, file: str, outcome: str, by: str, n_tests: int) -> Record:
        """After one more test file."""
        outcome = self.outcome if outcome == UNREACHED else outcome
        return replace(self, outcome=outcome, by=by, n_tests=self.n_tests + n_tests, files=(*self.files, file))


def trial(site: Site, items: Sequence[pytest.Item], package: Path, patience: float) -> tuple[str, str]:
    """The outcome and whose it is. Tests in the order given; `patience` is how many seconds one of them may take."""
    left = list(items)
    while left:
        said, ended = forked(lambda say, left=left: _first_failure(site, left, package, say), patience)
        if said[-1] == "all passed":
            break
        failed = next(k for k, item in enumerate(left) if item.nodeid == said[-1])
        if not _fails_anyway(left[failed], patience):
            return KILLED if ended else TIMEOUT, said[-1]
        left = left[failed + 1 :]
    return (SURVIVED if items else UNREACHED), ""


def _first_failure(site: Site, items: Sequence[pytest.Item], package: Path, say: Callable[[Any], None]) -> None:
    """Says every test before it runs, so that the last one said is the one that failed."""
    plant(site, package)
    for item, following in zip(items, [*items[1:], None], strict=True):
        say(item.nodeid)
        if not passes(item, following):
            return
    say("all passed")


def _fails_anyway(item: pytest.Item, patience: float) -> bool:
    said, _ = forked(lambda say: say(passes(item, None)), patience)
    return said != [True]
