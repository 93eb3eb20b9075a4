"""CPU seconds and peak memory of a piece of work, and a limit on the first."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import TypeVar

from lapwing_studies.bench.jobs.records import Phase
from lapwing_studies.bench.memory import peak_mib, resident_mib

T = TypeVar("T")


class OutOfTime(BaseException):
    """Not an Exception: code that catches those must not catch this."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime after so many CPU seconds of this process, at the next step of the interpreter."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass(frozen=True)
class Meter:
    """`imported_mib` is what the process held after its imports: every peak is counted above it."""

    imported_mib: float | None

    @staticmethod
    def started() -> Meter:
        return Meter(resident_mib())

    def measured(self, work: Callable[[], T]) -> tuple[T, Phase]:
        """Run once, without a warm-up."""
        results: list[T] = []
        seconds: list[float] = []

        def timed() -> None:
            start = process_time()
            results.append(work())
            seconds.append(process_time() - start)

        peak = peak_mib(timed)
        above = None if peak is None or self.imported_mib is None else round(peak - self.imported_mib, 1)
        return results[0], Phase(seconds=round(seconds[0], 4), peak_mib=above)


def unit_seconds(work: Callable[[], object]) -> float:
    """Median of three rounds after one that is not counted; one of more than ten seconds is run once.

    A short one is repeated until a round takes a tenth of a second: the CPU clock of some systems ticks every 10 ms.
    """
    first = seconds_of(work)
    if first > 10:
        return first
    repeats = 1
    while (taken := seconds_of(work, repeats)) < 0.1:
        repeats *= 2
    return median([taken / repeats, *(seconds_of(work, repeats) / repeats for _ in range(2))])


def seconds_of(work: Callable[[], object], repeats: int = 1) -> float:
    start = process_time()
    for _ in range(repeats):
        work()
    return process_time() - start
