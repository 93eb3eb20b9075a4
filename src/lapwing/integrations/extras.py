"""Libraries that only one adapter needs, imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lapwing.errors import LapwingError


class MissingExtraError(LapwingError, ImportError):
    """A library that an adapter needs is not installed."""


def needed(module: str, *, extra: str) -> Any:
    """The module, or an error that names the extra which brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"This needs {module.partition('.')[0]}, which cannot be imported ({error}). Install it with "
            f"pip install 'lapwing[{extra}]'."
        ) from error
