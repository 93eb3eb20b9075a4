"""Draws of weights from N(μ, P⁻¹)."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError
from lapwing.operators import Precision, SeparatePrecision


def weight_deviations(
    precision: Precision, n: int, *, generator: torch.Generator, device: torch.device
) -> Float[Tensor, "n p"]:
    """n draws from N(0, P⁻¹)."""
    return precision.draws(counted("n", n), generator=generator, device=device)


def copy_deviations(precision: SeparatePrecision, n: int, *, generator: torch.Generator) -> Float[Tensor, "n c p"]:
    """The same where every output has a copy of the weights."""
    sizes = (counted("n", n), len(precision.outputs), precision.p), (n, precision.n_tied)
    device = precision.P0.index.device
    eps, more = (
        torch.randn(size, generator=generator, dtype=torch.float64, device=generator.device).to(device)
        for size in sizes
    )
    return precision.copies(eps, more)


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


def counted(argument: str, n: Any) -> int:
    """A number of draws: whole, one at least."""
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise InputTypeError(f"{argument}: expected a whole number of draws, got {type(n).__name__} {n!r}.")
    if n < 1:
        raise InputError(f"{argument}: expected at least 1 draw, got {n}.")
    return int(n)
