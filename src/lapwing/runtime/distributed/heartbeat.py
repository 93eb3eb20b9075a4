"""Who is still alive: every rank beats, and listens to the next one.

A slow rank beats on while it works, however long that takes; one that was killed, or whose machine froze, does not. A
job that is suspended as a whole goes on where it was: nobody was listening meanwhile, so nobody was silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic, sleep

import torch.distributed as dist

from lapwing.errors import RankError

FAILED = "failed"
_BEAT, _SILENCE = 1.0, 20.0  # seconds between beats, and without one before a rank counts as gone
_ROLL_CALL = 5.0  # seconds to answer, after an exchange broke off


class Heartbeat:
    """Beats of this rank and an ear for the next, in a store; and the note that ends a call for all."""

    def __init__(self, call: str, rank: int, world: int, store: dist.Store) -> None:
        self.call, self.rank, self.world, self.store = call, rank, world, store
        self.ended = Event()
        self.thread = Thread(target=self._watch, name="lapwing-heartbeat", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(timeout=_BEAT)

    def post(self, words: str) -> None:
        """End the call in all ranks; the first note stands."""
        with self.store_at_hand():
            self.store.compare_set(FAILED, "", words)

    def check(self) -> None:
        """Raise if the call has failed somewhere."""
        if self.store.check([FAILED]):
            words = self.store.get(FAILED).decode().removesuffix(".")
            raise RankError(f"{self.call}: {words}. All ranks have stopped.")

    def call_the_roll(self, broken: RuntimeError) -> None:
        """An exchange broke off: those who do not answer have gone."""
        self.store.set(f"alive/{self.rank}", "here")
        self.store.set("roll", "call")  # those still waiting for the exchange answer in their watch
        deadline = monotonic() + _ROLL_CALL
        while monotonic() < deadline and self._silent():
            sleep(0.05)
        gone = ", ".join(map(str, self._silent()))
        self.post(f"rank {gone} is gone" if gone else f"the exchange between ranks broke off ({broken})")
        self.check()

    @contextmanager
    def store_at_hand(self) -> Iterator[None]:
        """A store that does not answer is that of a process which has ended."""
        try:
            yield
        except dist.DistError as error:
            raise RankError(
                f"{self.call}: the store of the process group does not answer: rank 0, or whichever process holds it, "
                f"has ended ({type(error).__name__}: {error})."
            ) from error

    def _silent(self) -> list[int]:
        return [r for r in range(self.world) if not self.store.check([f"alive/{r}"])]

    def _watch(self) -> None:
        next_one, last, silence, looked, beats = (self.rank + 1) % self.world, b"", 0.0, monotonic(), 0
        while True:
            since, looked = monotonic() - looked, monotonic()
            silence += min(since, max(2 * _BEAT, _SILENCE / 4))  # between two looks further apart we were asleep
            try:
                self.store.set(f"beat/{self.rank}", str(beats))
                if self.store.check(["roll"]):
                    self.store.set(f"alive/{self.rank}", "here")
                if self.store.check([f"beat/{next_one}"]):
                    beat = self.store.get(f"beat/{next_one}")
                    last, silence = (beat, 0.0) if beat != last else (last, silence)
                if last and silence > _SILENCE:
                    self.store.compare_set(FAILED, "", f"rank {next_one} is gone: no sign of it for {_SILENCE:.0f} s")
            except RuntimeError:
                return  # the store has gone; whoever waits for it next finds out and says so
            beats += 1
            if self.ended.wait(_BEAT):
                return
