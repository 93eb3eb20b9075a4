"""A progress bar for work that takes more than a second while someone is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

T = TypeVar("T")


def shown(items: Iterable[T], *, total: int, what: str, progress: bool | None) -> Iterator[T]:
    """The items, with a bar: `None` shows it after a second on a terminal, `True` always, `False` never."""
    yield from bar(items, total=total, what=what, progress=progress)


def bar(items: Iterable[T], *, total: int, what: str, progress: bool | None) -> tqdm[T]:
    """The same as a bar that can be told what to say besides; close it when leaving early."""
    hidden = not sys.stderr.isatty() if progress is None else not progress
    delay = 1.0 if progress is None else 0.0
    return tqdm(items, total=total or None, desc=what, disable=hidden, delay=delay, leave=False)
