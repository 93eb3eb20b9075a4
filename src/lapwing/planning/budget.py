"""Memory as people write it, and how much of it may hold rows."""

from __future__ import annotations

import re
from math import inf

from lapwing.errors import InputError, InputTypeError

_DEFAULT_BYTES = 4 << 30
_MOST_ROWS = 192 << 20  # larger pieces gain no speed
_LEAST_ROWS = 1 << 20
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_memory(memory: str | float | None) -> int:
    """Bytes of a budget such as "4GB", 2e9 or None (the default, 4 GiB)."""
    if memory is None:
        return _DEFAULT_BYTES
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


def chunk_floats(budget: int, needed: int) -> int:
    """Numbers that rows may take at a time: a third of what is left, within bounds."""
    return min(_MOST_ROWS, max((budget - needed) // 3, _LEAST_ROWS)) // 8


def in_words(n_bytes: float) -> str:
    """1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.3g} TiB"
