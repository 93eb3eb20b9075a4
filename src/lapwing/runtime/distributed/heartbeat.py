"""Failure detection by heartbeats: a thread on every rank writes a counter to the store and watches that of the next.

The counter of a slow rank keeps changing, however long its work takes; that of a killed or frozen process does not. If
the whole job is suspended, no rank is reported: the time in which the watching rank itself did not run is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic, sleep

import torch.distributed as dist

from lapwing.errors import RankError

FAILED = "failed"
_INTERVAL, _TIMEOUT = 1.0, 20.0  # seconds between heartbeats, and without one before a rank counts as dead
_PING_TIMEOUT = 5.0  # seconds for ranks to answer after a collective broke off


class Heartbeat:
    """Writes the heartbeat of this rank, watches the next rank, and reports failures to all ranks through the store."""

    def __init__(self, call: str, rank: int, world_size: int, store: dist.Store) -> None:
        self.call, self.rank, self.world_size, self.store = call, rank, world_size, store
        self.ended = Event()
        self.thread = Thread(target=self._watch, name="lapwing-heartbeat", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(timeout=_INTERVAL)

    def report_failure(self, words: str) -> None:
        """End the call on all ranks. Only the first report is kept: later ones are usually its consequences."""
        with self.store_errors():
            self.store.compare_set(FAILED, "", words)

    def check(self) -> None:
        """Raise a RankError if any rank has reported a failure."""
        if self.store.check([FAILED]):
            words = self.store.get(FAILED).decode().removesuffix(".")
            raise RankError(f"{self.call}: {words}. All ranks have stopped.")

    def find_dead_ranks(self, broken: RuntimeError) -> None:
        """After a collective broke off: ask all ranks for a sign of life, and report those that do not answer."""
        self.store.set(f"alive/{self.rank}", "here")
        self.store.set("ping", "sent")  # ranks that still wait for the collective answer from their heartbeat thread
        deadline = monotonic() + _PING_TIMEOUT
        while monotonic() < deadline and self._unanswered():
            sleep(0.05)
        gone = ", ".join(map(str, self._unanswered()))
        self.report_failure(f"rank {gone} is gone" if gone else f"the exchange between ranks broke off ({broken})")
        self.check()

    @contextmanager
    def store_errors(self) -> Iterator[None]:
        """Turn errors of the store into a RankError: the process that hosts it has ended."""
        try:
            yield
        except dist.DistError as error:
            raise RankError(
                f"{self.call}: the store of the process group does not answer: rank 0, or whichever process holds it, "
                f"has ended ({type(error).__name__}: {error})."
            ) from error

    def _unanswered(self) -> list[int]:
        return [r for r in range(self.world_size) if not self.store.check([f"alive/{r}"])]

    def _watch(self) -> None:
        next_rank, last, silence, checked, beats = (self.rank + 1) % self.world_size, b"", 0.0, monotonic(), 0
        while True:
            since, checked = monotonic() - checked, monotonic()
            # A longer gap between two checks means that this process itself was suspended: count a part of it only.
            silence += min(since, max(2 * _INTERVAL, _TIMEOUT / 4))
            try:
                self.store.set(f"beat/{self.rank}", str(beats))
                if self.store.check(["ping"]):
                    self.store.set(f"alive/{self.rank}", "here")
                if self.store.check([f"beat/{next_rank}"]):
                    beat = self.store.get(f"beat/{next_rank}")
                    last, silence = (beat, 0.0) if beat != last else (last, silence)
                if last and silence > _TIMEOUT:
                    self.store.compare_set(FAILED, "", f"rank {next_rank} is gone: no sign of it for {_TIMEOUT:.0f} s")
            except RuntimeError:
                return  # the store is gone; the main thread raises when it next uses it
            beats += 1
            if self.ended.wait(_INTERVAL):
                return
