"""Memory that the allocator keeps for later, given back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Give free pages back, also those between tensors that are kept; without effect where the C library has no way.

    Small results that are kept between large temporary tensors stand in the places that the next large ones would
    need, so that a long run of both holds as much as all the large ones together. About a millisecond for a gigabyte.
    """
    _trim()(0)


@cache
def _trim() -> Callable[[int], object]:
    """`malloc_trim` of the GNU C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda _: None
