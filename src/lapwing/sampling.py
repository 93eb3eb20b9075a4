"""Draws of weights from N(μ, P⁻¹)."""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError
from lapwing.operators import Precision


def weight_deviations(precision: Precision, n: int, *, generator: torch.Generator) -> Float[Tensor, "n p"]:
    """n draws from N(0, P⁻¹): R ε with R Rᵀ = P⁻¹."""
    if n < 1:
        raise InputError(f"The number of samples must be at least 1, got {n}.")
    eps = torch.randn(n, precision.p, generator=generator, dtype=torch.float64, device=generator.device)
    return precision.half_solve(eps)


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The user's generator, or one that gives the same draws on every call; never the global one."""
    return torch.Generator().manual_seed(0) if generator is None else generator
