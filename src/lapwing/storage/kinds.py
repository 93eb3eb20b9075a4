"""Posteriors of packages above this one: each says how it is written, and how it is read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lapwing.errors import StorageError
from lapwing.storage.container import Content


@dataclass(frozen=True)
class Kind:
    """A name in the file's document, the class it stands for, and both ways between them."""

    name: str
    of: type
    encode: Callable[[Any], Content]
    decode: Callable[[Mapping[str, Any], Mapping[str, Tensor], nn.Module], Any]


_KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Have `lw.save` write such values, and `lw.load` read them."""
    _KINDS[kind.name] = kind


def kind_of(value: Any) -> Kind | None:
    return next((kind for kind in _KINDS.values() if isinstance(value, kind.of)), None)


def kind_named(name: Any) -> Kind:
    if not isinstance(name, str) or name not in _KINDS:
        raise StorageError(f"it holds a posterior of a kind that is not known here: {name!r:.40}.")
    return _KINDS[name]
