"""Checkpoints of several ranks that must resume from the same step.

Every rank writes a step under a temporary name first; it replaces the last one only after all ranks have written. If
the ranks stop at any time, they have at least one step in common, and resume from the latest such step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapwing.runtime import distributed
from lapwing.storage.checkpoint import Checkpoint


@dataclass(eq=False)
class InStep(Checkpoint):
    """Two files in a directory of every rank: the last step that all ranks have, and the next one."""

    _turn: int = field(default=0, init=False)

    @property
    def _next(self) -> Path:
        return self.path.with_name(f"next-{self.path.name}")

    def resumed(self) -> dict[str, Any] | None:
        found = [state for path in (self.path, self._next) if (state := self.read(path)) is not None]
        turns = {state["turn"]: state for state in found}
        common = set.intersection(*map(set, distributed.gathered(list(turns))))
        self._turn = max(common, default=0)
        return turns.get(self._turn)

    def offer(self, state: Callable[[], dict[str, Any]]) -> None:
        if distributed.broadcast(self.due(), 0):  # clocks differ: rank 0 decides, so that all write the same step
            written = self.write(self._next, {**state(), "turn": self._turn + 1})
            if all(distributed.gathered(written)):
                self._promote_next()

    def _promote_next(self) -> None:
        os.replace(self._next, self.path)
        self._turn += 1

    @contextmanager
    def going_on(self) -> Iterator[None]:
        with super().going_on():
            yield
            distributed.gathered("done")  # a rank must not delete its files while another may have to resume
        self._next.unlink(missing_ok=True)
