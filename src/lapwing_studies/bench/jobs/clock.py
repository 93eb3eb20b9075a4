"""Measure CPU seconds and peak memory, and limit the CPU seconds."""

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
    """A BaseException, so that `except Exception` does not catch it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime after so many CPU seconds of this process, between two bytecode instructions."""

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
    """`imported_mib`: the memory after imports, above which peaks are measured."""

    imported_mib: float | None

    @staticmethod
    def started() -> Meter:
        return Meter(resident_mib())

    def measured(self, work: Callable[[], T]) -> tuple[T, Phase]:
        """Run once, without warm-up."""
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
    """Median of three rounds after a warm-up; a single round if it takes more than ten seconds.

    Short work is repeated until a round takes 0.1 s, as the CPU clock of some systems has a resolution of 10 ms.
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
