"""Work in a child process that shares what has been imported, and cannot harm its parent."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

_MOST_BYTES = 12 << 30  # a mutant may ask for any amount of memory


def forked(work: Callable[[Callable[[Any], None]], None], limit: float | None = None) -> tuple[list[Any], bool]:
    """What `work` said before it ended, and whether it did within so many seconds; else it is stopped."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, writing)
    os.close(writing)
    try:
        lines, ended = _read(reading, limit)
    finally:
        os.killpg(pid, signal.SIGKILL)  # with whatever it has started
        os.waitpid(pid, 0)
    said = [json.loads(line) for line in lines]
    if said and isinstance(said[-1], dict) and "error" in said[-1]:
        raise RuntimeError(said[-1]["error"])
    return said, ended


def _child(work: Callable[[Callable[[Any], None]], None], writing: int) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    say = partial(_write, writing)
    try:
        work(say)
    except BaseException:
        say({"error": traceback.format_exc()})
    finally:
        os._exit(0)


def _write(writing: int, value: Any) -> None:
    raw = json.dumps(value).encode() + b"\n"
    while raw:
        raw = raw[os.write(writing, raw) :]


def _read(reading: int, limit: float | None) -> tuple[list[str], bool]:
    """Lines until the other end is closed, or nothing more has come for so long."""
    raw = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], limit)[0]:
            some = pipe.read(1 << 16)
            if not some:
                return raw.decode().splitlines(), True
            raw += some
    return raw.decode().rpartition("\n")[0].splitlines(), False
