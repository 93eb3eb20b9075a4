"""A call that all ranks make together, and how an error in one of them ends it in all.

Ranks meet in the process group's store before every exchange of tensors and at the end, so nothing is sent that is not
waited for. A rank that fails leaves a note there instead of coming; the others find it and raise.
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

_EXCHANGE = 10.0  # seconds that an exchange may still take after a rank has failed
_LATEST_ARRIVAL = 1800.0  # seconds that a rank may come later to a call than the others, as in torch itself
_numbers = count()
_current: ContextVar[Call | None] = ContextVar("current", default=None)
_alone: ContextVar[bool] = ContextVar("alone", default=False)


def many() -> bool:
    """Whether data are spread over several processes."""
    return dist.is_available() and dist.is_initialized() and not _alone.get() and dist.get_world_size() > 1


def world() -> int:
    return dist.get_world_size() if many() else 1


def rank() -> int:
    return dist.get_rank() if many() else 0


def of_this_rank(generator: torch.Generator) -> torch.Generator:
    """Where ranks draw for their own data, draws that do not repeat those of another; else the generator itself."""
    if not many():
        return generator
    seed = int(torch.randint(1 << 48, (), generator=generator, device=generator.device))
    return torch.Generator(generator.device).manual_seed(seed + rank())


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process works for itself, on data that are its own."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def together(name: str) -> Iterator[None]:
    """A call of all ranks: it succeeds in all of them, or raises in all of them."""
    if not many() or _current.get() is not None:
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
    """The call that is going on, or one for a single exchange."""
    call = _current.get()
    if call is not None:
        yield call
        return
    with Call("a pass over the data") as single:
        yield single


class Call:
    """One collective call of this process."""

    def __init__(self, name: str) -> None:
        self.name, self.rank, self.world = name, dist.get_rank(), dist.get_world_size()
        self.store = dist.PrefixStore(f"lapwing/{next(_numbers)}", _get_default_store())
        self.heartbeat = Heartbeat(name, self.rank, self.world, self.store)
        self.n_meetings = 0

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
                self.meet("the end")
            elif not isinstance(error, RankError):
                self.heartbeat.post(f"rank {self.rank}: {type(error).__name__}: {error}")
        finally:
            self.heartbeat.stop()

    def meet(self, what: str) -> None:
        """Wait until every rank has come here; raise if one has failed, or has come for something else."""
        self.n_meetings += 1
        key = f"meeting/{self.n_meetings}"
        with self.heartbeat.store_at_hand():
            if self.rank == 0:
                self.store.set(f"{key}/what", what)
            if self.store.add(key, 1) == self.world:
                self.store.set(f"{key}/all", "here")
            self._wait(lambda: self.store.check([f"{key}/all"]))
            others = self.store.get(f"{key}/what").decode()
        if others != what:
            self.heartbeat.post(f"rank {self.rank} came to {what}, rank 0 to {others}")
            self.heartbeat.check()

    def wait_for(self, work: dist.Work) -> None:
        """Wait for an exchange of tensors; one that breaks off is a rank that has gone."""
        with self.heartbeat.store_at_hand():
            # Everyone has begun it, so it ends by itself even when a rank fails behind it, unless one is gone.
            self._wait(work.is_completed, patience=_EXCHANGE)
            try:
                work.wait()
            except RuntimeError as error:
                self.heartbeat.call_the_roll(error)

    def _arrive(self) -> None:
        """The first meeting: a process that ended before it came is known by its closed connections."""
        with self.heartbeat.store_at_hand():
            self.store.set(f"arrived/{self.rank}", "here")
            touch = None
            if dist.get_backend() == "gloo":
                here = torch.zeros(1)
                touch = dist.all_gather([torch.zeros(1) for _ in range(self.world)], here, async_op=True)
            started = monotonic()
            self._wait(lambda: self._all_arrived(touch, started))
            if touch is not None:
                self.wait_for(touch)

    def _all_arrived(self, touch: dist.Work | None, started: float) -> bool:
        broken = touch is not None and touch.is_completed() and _failed(touch)
        if not broken and monotonic() - started < _LATEST_ARRIVAL:
            return touch.is_completed() if touch is not None else self._missing() == []
        sleep(1.0 if broken else 0.0)  # those on their way
        missing = ", ".join(map(str, self._missing()))
        self.heartbeat.post(
            f"rank {missing or 'unknown'} never came to {self.name}: its process has ended, or it was late"
        )
        self.heartbeat.check()
        return False

    def _missing(self) -> list[int]:
        return [r for r in range(self.world) if not self.store.check([f"arrived/{r}"])]

    def _wait(self, done: Callable[[], bool], patience: float = 0.0) -> None:
        """Poll, less and less often; give up so many seconds after the call has failed elsewhere."""
        pause, failed = 5e-5, 0.0
        while not done():
            if pause > 2e-3 and self.store.check([FAILED]):
                failed = failed or monotonic()
                if monotonic() - failed >= patience:
                    self.heartbeat.check()
            sleep(pause)
            pause = min(1.5 * pause, 0.05)


def _failed(work: dist.Work) -> bool:
    """Whether an exchange that is over broke off."""
    try:
        work.wait()
    except RuntimeError:
        return True
    return False
