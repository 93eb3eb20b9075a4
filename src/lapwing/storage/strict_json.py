"""Strict JSON: no duplicate keys, no NaN, no unbounded nesting."""

from __future__ import annotations

import json
from typing import Any

from lapwing.errors import StorageError


def strictly_parsed(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refused)
    except StorageError:
        raise
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise StorageError(f"{what} is not JSON.") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise StorageError("a key of the header comes twice.")
    return found


def _refused(word: str) -> Any:
    raise StorageError(f"the header holds {word}, which is not JSON.")
