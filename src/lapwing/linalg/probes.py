"""Probe vectors z with E z zᵀ = I for stochastic trace estimation. They are seeded, so estimates are reproducible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError
from lapwing.linalg.trace import signs


class Probes(ABC):
    """A set of probe vectors for matrices of any size p."""

    complete: bool  # whether the mean of z zᵀ is exactly I, so that traces have no statistical error

    @abstractmethod
    def count(self, p: int) -> int:
        """Number of probes."""

    @abstractmethod
    def some(self, p: int, which: slice) -> Float[Tensor, "m p"]:
        """The probes `which`, so that only a part of them is in memory at a time."""


@dataclass(frozen=True)
class Rademacher(Probes):
    """n vectors of independent random signs ±1."""

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
        # One seed per probe, so that the probes do not depend on how many are requested at a time.
        seeds = range(self.n)[which]
        return torch.cat([signs(1, p, torch.Generator().manual_seed(self.seed * 1_000_003 + k)) for k in seeds])


@dataclass(frozen=True)
class UnitVectors(Probes):
    """All P scaled unit vectors √P e_i: traces are exact, at the cost of P solves. For few parameters."""

    complete = True

    def count(self, p: int) -> int:
        return p

    def some(self, p: int, which: slice) -> Float[Tensor, "m p"]:
        return p**0.5 * torch.eye(p, dtype=torch.float64)[which]
