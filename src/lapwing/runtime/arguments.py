"""Arguments that many calls share: a generator, a number of draws."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from lapwing.errors import InputError, InputTypeError


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The user's generator, or one that gives the same draws on every call; never the global one."""
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise InputTypeError(
            f"generator: expected a torch.Generator, got {type(generator).__name__}. "
            "From a seed: torch.Generator().manual_seed(seed)."
        )
    return generator


def counted(argument: str, n: Any, what: str = "draw") -> int:
    """A number of draws, or of something else: whole, one at least."""
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise InputTypeError(f"{argument}: expected a whole number of {what}s, got {type(n).__name__} {n!r}.")
    if n < 1:
        raise InputError(f"{argument}: expected at least 1 {what}, got {n}.")
    return int(n)
