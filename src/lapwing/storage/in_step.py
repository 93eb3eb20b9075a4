"""Unfinished work of several ranks that go from turn to turn together, each with the outputs of its own data.

A turn is written by all ranks or by none, under another name first; that of the last turn is given up when everyone has
the new one. Whenever the ranks end, all of them have one turn in common, and go on from there.
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
    """Two files in a directory of every rank: the last turn that all have, and the next while it is being written."""

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
        if distributed.broadcast(self.due(), 0):
            written = self.write(self._next, {**state(), "turn": self._turn + 1})
            if all(distributed.gathered(written)):
                self._give_up_the_last()

    def _give_up_the_last(self) -> None:
        os.replace(self._next, self.path)
        self._turn += 1

    @contextmanager
    def going_on(self) -> Iterator[None]:
        with super().going_on():
            yield
            distributed.gathered("done")  # nobody forgets what another may still need
        self._next.unlink(missing_ok=True)
