"""Collective calls: an error on one rank ends the call on all ranks.

A torch.distributed collective hangs when one rank raises before it. So ranks first synchronise at a barrier in the
process group's key-value store, before every collective and at the end of the call. A rank that fails writes its error
to the store; the others read it while they wait, and raise a RankError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lapwing.errors import RankError
from lapwing.runtime.distributed.heartbeat import FAILED, Heartbeat

_COLLECTIVE_TIMEOUT = 10.0  # seconds that a running collective may still take after a rank has failed
_ARRIVAL_TIMEOUT = 1800.0  # seconds that ranks may enter a call apart from each other; gloo's own default
_numbers = count()
_current: ContextVar[Call | None] = ContextVar("current", default=None)
_single: ContextVar[bool] = ContextVar("single", default=False)


def is_distributed() -> bool:
    """Whether the data are sharded over several processes."""
    return dist.is_available() and dist.is_initialized() and not _single.get() and dist.get_world_size() > 1


def world_size() -> int:
    return dist.get_world_size() if is_distributed() else 1


def rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def rank_generator(generator: torch.Generator) -> torch.Generator:
    """A generator for random numbers that belong to this rank's own data; the given one in a single process.

    All ranks hold equal generators. Drawing from them directly would repeat the same noise on every shard.
    """
    if not is_distributed():
        return generator
    seed = int(torch.randint(1 << 48, (), generator=generator, device=generator.device))
    return torch.Generator(generator.device).manual_seed(seed + rank())


@contextmanager
def alone() -> Iterator[None]:
    """Inside this context the process works on its own data and takes part in no collective."""
    token = _single.set(True)
    try:
        yield
    finally:
        _single.reset(token)


@contextmanager
def collective_call(name: str) -> Iterator[None]:
    """A call that all ranks make: it succeeds on all of them or raises on all of them. Nested calls join the outer."""
    if not is_distributed() or _current.get() is not None:
        yield
        return
    with Call(name) as call:
        token = _current.set(call)
        try:
            yield
        finally:
            _current.reset(token)


@contextmanager
def current() -> Iterator[Call]:
    """The active call, or a new one for a single collective."""
    call = _current.get()
    if call is not None:
        yield call
        return
    with Call("a pass over the data") as single:
        yield single


class Call:
    """This rank's part of one collective call."""

    def __init__(self, name: str) -> None:
        self.name, self.rank, self.world_size = name, dist.get_rank(), dist.get_world_size()
        # All ranks make the same calls in the same order, so equal numbers name the same call.
        self.store = dist.PrefixStore(f"lapwing/{next(_numbers)}", _get_default_store())
        self.heartbeat = Heartbeat(name, self.rank, self.world_size, self.store)
        self.n_barriers = 0

    def __enter__(self) -> Call:
        self.heartbeat.start()
        try:
            self._arrive()
        except BaseException:
            self.heartbeat.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self.barrier("the end")
            elif not isinstance(error, RankError):  # a RankError reports a failure that is in the store already
                self.heartbeat.report_failure(f"rank {self.rank}: {type(error).__name__}: {error}")
        finally:
            self.heartbeat.stop()

    def barrier(self, what: str) -> None:
        """Wait until every rank reaches the same operation; raise if one has failed or reached a different one."""
        self.n_barriers += 1
        key = f"barrier/{self.n_barriers}"
        with self.heartbeat.store_errors():
            if self.rank == 0:
                self.store.set(f"{key}/what", what)
            # The counter of `add` and this flag are two keys, as `check` on a counter is true from its first increment.
            if self.store.add(key, 1) == self.world_size:
                self.store.set(f"{key}/all", "here")
            self._wait(lambda: self.store.check([f"{key}/all"]))
            others = self.store.get(f"{key}/what").decode()
        if others != what:
            self.heartbeat.report_failure(f"rank {self.rank} came to {what}, rank 0 to {others}")
            self.heartbeat.check()

    def wait_for(self, work: dist.Work) -> None:
        """Wait for an asynchronous collective; if it breaks off, find out which rank's process has ended."""
        with self.heartbeat.store_errors():
            # All ranks have passed the barrier and started this collective. It completes even if a rank fails
            # afterwards, unless a process has ended; so wait on for a while after a reported failure.
            self._wait(work.is_completed, patience=_COLLECTIVE_TIMEOUT)
            try:
                work.wait()
            except RuntimeError as error:
                self.heartbeat.find_dead_ranks(error)

    def _arrive(self) -> None:
        """First barrier of a call. A process that ended before the call is detected by its closed gloo connections.

        Its heartbeat cannot tell: it never started one in this call.
        """
        with self.heartbeat.store_errors():
            self.store.set(f"arrived/{self.rank}", "here")
            ping = None
            if dist.get_backend() == "gloo":
                here = torch.zeros(1)
                ping = dist.all_gather([torch.zeros(1) for _ in range(self.world_size)], here, async_op=True)
            started = monotonic()
            self._wait(lambda: self._all_arrived(ping, started))
            if ping is not None:
                self.wait_for(ping)

    def _all_arrived(self, ping: dist.Work | None, started: float) -> bool:
        broken = ping is not None and ping.is_completed() and _failed(ping)
        if not broken and monotonic() - started < _ARRIVAL_TIMEOUT:
            return ping.is_completed() if ping is not None else self._missing() == []
        sleep(1.0 if broken else 0.0)  # let ranks that are alive register before the missing ones are named
        missing = ", ".join(map(str, self._missing()))
        self.heartbeat.report_failure(
            f"rank {missing or 'unknown'} never came to {self.name}: its process has ended, or it was late"
        )
        self.heartbeat.check()
        return False

    def _missing(self) -> list[int]:
        return [r for r in range(self.world_size) if not self.store.check([f"arrived/{r}"])]

    def _wait(self, done: Callable[[], bool], patience: float = 0.0) -> None:
        """Poll `done` with growing intervals; raise `patience` seconds after another rank has reported a failure."""
        pause, failed = 5e-5, 0.0
        while not done():
            # Ask the store only after the first few polls: most waits end sooner than one round trip to it takes.
            if pause > 2e-3 and self.store.check([FAILED]):
                failed = failed or monotonic()
                if monotonic() - failed >= patience:
                    self.heartbeat.check()
            sleep(pause)
            pause = min(1.5 * pause, 0.05)


def _failed(work: dist.Work) -> bool:
    """Whether a completed collective ended with an error."""
    try:
        work.wait()
    except RuntimeError:
        return True
    return False
