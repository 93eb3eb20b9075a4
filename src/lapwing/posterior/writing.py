"""posterior.save without an import of `storage`, which imports this package: the writer registers itself here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., None])

_writers: list[Callable[..., None]] = []


def writes_posteriors(function: F) -> F:
    """Decorator for the function (posterior, path) that `posterior.save(path)` calls."""
    _writers[:] = [function]
    return function


def write(posterior: Any, path: str | os.PathLike[str]) -> None:
    _writers[0](posterior, path)
