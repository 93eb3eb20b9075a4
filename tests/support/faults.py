"""Processes that die, and disks that are full, at a place of one's choosing."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lapwing.storage import atomic, container


def died_at(point: int, run: Callable[[], Any]) -> bool:
    """Run in a child that kills itself with SIGKILL at the point-th step of writing; whether it got there."""
    pid = os.fork()
    if pid == 0:
        steps = iter(range(10**9))

        def step() -> None:
            if next(steps) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            _watch(step)
            run()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def _watch(step: Callable[[], None]) -> None:
    """Call `step` before every write, sync and rename of a file that is being replaced."""
    fill, fsync, rename = container.write, os.fsync, os.replace

    class Slow:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, content: Any) -> None:
            step()
            self.file.write(content)
            self.file.flush()

    container.write = lambda file, content: fill(Slow(file), content)
    watched = {"fsync": lambda f: (step(), fsync(f)), "replace": lambda *a: (step(), rename(*a))}
    atomic.os = type("os", (), {**vars(os), **watched})


@contextmanager
def files_up_to(n_bytes: int) -> Iterator[None]:
    """No file can become longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
