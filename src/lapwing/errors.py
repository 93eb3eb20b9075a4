"""Every error Lapwing raises on purpose.

A message says what was expected, what came, where, and what to do about it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class LapwingError(Exception):
    """Base of all errors raised by Lapwing; every child is also a standard Python error."""


class InputError(LapwingError, ValueError):
    """A value the user passed is not one we can work with (NaN data, a negative precision, an unknown word)."""


class InputTypeError(LapwingError, TypeError):
    """An object of the wrong kind was passed (a function where a module is needed)."""


class ShapeError(InputError):
    """Two shapes that must agree do not."""


class StructureError(LapwingError, ValueError):
    """A structure was asked for something it cannot do exactly."""


class NumericalError(LapwingError, RuntimeError):
    """A matrix or a function left the domain where the answer is defined (not positive definite, not finite)."""


class ModelError(LapwingError, RuntimeError):
    """The model's own forward pass raised; its error is the `__cause__`."""


class RankError(LapwingError, RuntimeError):
    """A call that several processes make together failed in another of them, or one of them is gone."""


class StorageError(LapwingError, ValueError):
    """A file or directory is not what was expected of it: damaged, of another model, not writable."""


class LapwingWarning(UserWarning):
    """A result stands, but may not be what was wanted."""


def warn(message: str) -> None:
    """A LapwingWarning at the user's line that called into Lapwing."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, LapwingWarning, stacklevel=level)


_NOT_THE_USERS = {"lapwing", "contextlib"}  # contextlib: functions decorated with a context manager


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors of ours raised inside say where: "batch 3: …"."""
    try:
        yield
    except LapwingError as error:
        raise type(error)(f"{where}: {error}") from error.__cause__


class MissingExtraError(LapwingError, RuntimeError):
    """An optional package is not installed; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"This needs the package {package!r}, which is not installed. Run: pip install 'lapwing[{extra}]'"
        )
