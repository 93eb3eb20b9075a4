"""Progress bar (tqdm), shown by default on a terminal once the work has taken more than a second."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def shown(items: Iterable[T], *, total: int, what: str, progress: bool | None) -> Iterator[T]:
    """Iterate over `items` with a progress bar.

    `progress=None` shows it on a terminal after one second, `True` always, `False` never.
    """
    yield from bar(items, total=total, what=what, progress=progress)


def bar(items: Iterable[T], *, total: int, what: str, progress: bool | None) -> tqdm[T]:
    """The same as a tqdm object, for `set_postfix` and the like; call `close()` when leaving the loop early."""
    hidden = not sys.stderr.isatty() if progress is None else not progress
    delay = 1.0 if progress is None else 0.0
    # An unknown length is announced as 0 here; tqdm would print 0 % for it, but counts items for None.
    return tqdm(items, total=total or None, desc=what, disable=hidden, delay=delay, leave=False)
