"""Memory of the running process, as the system sees it; None where the system does not say."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_mib() -> float | None:
    """What the process holds now, after giving back what its allocator kept for later."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return _field("VmRSS")


def peak_mib(work: Callable[[], object]) -> float | None:
    """The most the process held at any time during the work.

    The mark of the system's own is set back first: `ru_maxrss` remembers the preparation, and the parent process.
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
