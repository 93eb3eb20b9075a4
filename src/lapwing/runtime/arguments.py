"""Argument validation shared by many functions: generators, counts, options and positive scales."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from math import isfinite
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from lapwing.errors import InputError, InputTypeError

T = TypeVar("T")


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The given generator, or a new one with seed 0, so that repeated calls draw the same numbers.

    torch's global generator is never used: a call must not change the user's random state.
    """
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise InputTypeError(
            f"generator: expected a torch.Generator, got {type(generator).__name__}. "
            "From a seed: torch.Generator().manual_seed(seed)."
        )
    return generator


def counted(argument: str, n: Any, what: str = "draw") -> int:
    """Validate a positive integer argument; `what` names in the singular what it counts."""
    # bool is a subclass of int, but n=True is a mistake. numbers.Integral includes NumPy integers.
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise InputTypeError(f"{argument}: expected a whole number of {what}s, got {type(n).__name__} {n!r}.")
    if n < 1:
        raise InputError(f"{argument}: expected at least 1 {what}, got {n}.")
    return int(n)


def choose(argument: str, word: Any, options: Mapping[str, T]) -> T:
    """Look up the option named `word`; the error lists all options and suggests the closest one."""
    if isinstance(word, str) and word in options:
        return options[word]
    known = ", ".join(f'"{option}"' for option in options)
    near = get_close_matches(str(word), options, n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    if not isinstance(word, str):
        came = f"the class {word.__name__}; write {word.__name__}()" if isinstance(word, type) else type(word).__name__
        raise InputTypeError(f"{argument}: expected one of {known} or the matching object, got {came}.")
    raise InputError(f'{argument}: unknown word "{word}".{hint} Known: {known}.')


def positive_scale(argument: str, value: Any) -> torch.Tensor:
    """Convert a positive, finite number or scalar tensor to a float64 tensor; gradients flow through it."""
    try:
        scale = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputTypeError(f"{argument}: expected one positive number, got {type(value).__name__}.") from None
    if scale.ndim or not bool(torch.isfinite(scale)) or float(scale.detach()) <= 0:
        raise InputError(f"{argument}: expected one positive, finite number, got {value!r}.")
    return scale


def positive(argument: str, value: Any) -> float:
    """A positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputTypeError(f"{argument}: expected a positive number, got {type(value).__name__} {value!r}.")
    number = float(value)
    if not (isfinite(number) and number > 0):
        raise InputError(f"{argument}: expected a positive, finite number, got {value}.")
    return number
