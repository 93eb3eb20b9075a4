"""Parse memory budgets, and divide them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from math import inf
from pathlib import Path

from lapwing.errors import InputError, InputTypeError

_MOST_BYTES = 4 << 30  # largest default budget
_MOST_ROWS = 192 << 20  # bytes of rows at a time; larger pieces are not faster
_LEAST_ROWS = 1 << 20  # bytes of rows at a time, even if the budget is used up
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_memory(memory: str | float | None) -> int:
    """Bytes of a budget such as "4GB", 2e9 or None (the default: 4 GiB or half of the free memory, if that is less)."""
    if memory is None:
        return min(_MOST_BYTES, max(available_memory() // 2, 1))
    if isinstance(memory, int | float):
        size = float(memory)
    elif isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([A-Za-z]*)\s*", memory)
        if not match or match[2].upper() not in _UNITS:
            raise InputError(f'memory: expected bytes or text such as "4GB" or "512MiB", got {memory!r}.')
        size = float(match[1]) * _UNITS[match[2].upper()]
    else:
        raise InputTypeError(f'memory: expected bytes or text such as "4GB", got {type(memory).__name__}.')
    if not 0 < size < inf:
        raise InputError(f'memory: the budget must be positive and finite, such as "4GB", got {memory!r}.')
    return int(size)


def available_memory() -> int:
    """Bytes that can be allocated without swapping; if the system does not say, twice the largest default budget."""
    with suppress(OSError, ValueError, IndexError):  # Linux: free memory plus reclaimable caches
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    with suppress(OSError, ValueError, AttributeError):  # other POSIX systems: half of the physical memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 2 * _MOST_BYTES


def chunk_floats(budget: int, needed: int) -> int:
    """Numbers that rows may take at a time: a third of the remaining budget, within bounds."""
    return min(_MOST_ROWS, max((budget - needed) // 3, _LEAST_ROWS)) // 8


def in_words(n_bytes: float) -> str:
    """Bytes as text: 1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} TiB"
