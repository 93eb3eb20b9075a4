"""Memory of the running process; None if the system does not report it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_mib() -> float | None:
    """Current resident memory, after the allocator has returned its free memory."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return _field("VmRSS")


def peak_mib(work: Callable[[], object]) -> float | None:
    """Peak resident memory during the work.

    Resets the system's peak first: `ru_maxrss` would include the preparation and the parent process.
    """
    resident_mib()
    try:
        _RESET.write_text("5")
    except OSError:
        work()
        return None
    work()
    return _field("VmHWM")


def _field(name: str) -> float | None:
    if not _STATUS.exists():
        return None
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    return None if found is None else int(found[1]) / 1024
