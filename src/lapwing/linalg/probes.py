"""Probes z with mean of z zᵀ = I, by which traces are read off products. They come from a seed: always the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError
from lapwing.linalg.trace import signs


class Probes(ABC):
    """A way to choose probes."""

    complete: bool  # whether z zᵀ averages to I exactly, so that traces have no statistical error

    @abstractmethod
    def count(self, p: int) -> int: ...

    @abstractmethod
    def some(self, p: int, which: slice) -> Float[Tensor, "m p"]:
        """Some of them: probes of many parameters are not all in memory together."""


@dataclass(frozen=True)
class Rademacher(Probes):
    """n vectors of random signs."""

    n: int = 16
    seed: int = 0
    complete = False

    def __post_init__(self) -> None:
        for name, least in (("n", 2), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputTypeError(
                    f"Rademacher: {name} must be a whole number, got {type(value).__name__} {value!r}."
                )
            if value < least:
                raise InputError(f"Rademacher: {name} must be at least {least}, got {value}.")

    def count(self, p: int) -> int:
        return self.n

    def some(self, p: int, which: slice) -> Float[Tensor, "m p"]:
        # Each probe has a seed of its own, so that it does not depend on how many are asked for together.
        seeds = range(self.n)[which]
        return torch.cat([signs(1, p, torch.Generator().manual_seed(self.seed * 1_000_003 + k)) for k in seeds])


@dataclass(frozen=True)
class UnitVectors(Probes):
    """√P e_i for every i: exact, at P solves. For few parameters."""

    complete = True

    def count(self, p: int) -> int:
        return p

    def some(self, p: int, which: slice) -> Float[Tensor, "m p"]:
        return p**0.5 * torch.eye(p, dtype=torch.float64)[which]
