"""Check a value against a type annotation: the fields of dataclasses define their own file format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin


def conforms(value: Any, hint: Any) -> bool:
    """Supports jaxtyping shapes, unions, tuples, literals and classes.

    An int is accepted for a float, a bool is not.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(conforms(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and _items_conform(value, arguments)
    if origin is Sequence:
        return isinstance(value, tuple) and all(conforms(item, arguments[0]) for item in value)
    if origin is Mapping or origin is dict:
        return isinstance(value, dict) and all(conforms(item, arguments[1]) for item in value.values())
    if hint is None or hint is NoneType:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # jaxtyping annotations check dtype and shape in isinstance.
    return isinstance(value, hint)


def _items_conform(value: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return all(conforms(item, arguments[0]) for item in value)
    return len(value) == len(arguments) and all(map(conforms, value, arguments))
