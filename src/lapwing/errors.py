"""Exceptions and warnings raised by Lapwing.

Every exception derives from `LapwingError` and from the matching built-in exception, so `except ValueError` works too.
A message says what was expected, what was passed, where, and what to do.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class LapwingError(Exception):
    """Base class of all errors raised by Lapwing; every subclass is also a built-in Python exception."""


class InputError(LapwingError, ValueError):
    """An argument has an invalid value: NaN in the data, a negative precision, an unknown option."""


class InputTypeError(LapwingError, TypeError):
    """An argument has the wrong type, such as a function where a module is expected."""


class ShapeError(InputError):
    """Two tensor shapes that must agree do not."""


class StructureError(LapwingError, ValueError):
    """An operation that this curvature structure cannot compute exactly was requested."""


class NumericalError(LapwingError, RuntimeError):
    """A result is undefined for these numbers: a matrix is not positive definite, or a value is not finite."""


class ModelError(LapwingError, RuntimeError):
    """The model's forward pass raised an exception, which is kept as `__cause__`."""


class RankError(LapwingError, RuntimeError):
    """A collective call failed on another rank, or the process of another rank has ended."""


class StorageError(LapwingError, ValueError):
    """A file or directory cannot be used: it is corrupt, belongs to another model, or is not writable."""


class LapwingWarning(UserWarning):
    """The result is valid, but may not be what the user intended."""


def warn(message: str) -> None:
    """Issue a LapwingWarning located at the line of user code that called Lapwing."""
    # A fixed stacklevel would name a line inside Lapwing: internal call depth differs between callers.
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL_PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, LapwingWarning, stacklevel=level)


_INTERNAL_PACKAGES = {"lapwing", "contextlib"}  # functions decorated with a context manager have a frame in contextlib


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix the message of any LapwingError raised inside with a location, such as "batch 3: …"."""
    try:
        yield
    except LapwingError as error:
        raise type(error)(f"{where}: {error}") from error.__cause__


class MissingExtraError(LapwingError, RuntimeError):
    """An optional package is not installed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"This needs the package {package!r}, which is not installed. Run: pip install 'lapwing[{extra}]'"
        )
