"""Sample weights from N(μ, P⁻¹)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.operators import Precision, SeparatePrecision
from lapwing.runtime.arguments import counted


@dataclass(frozen=True, eq=False)
class WeightDraws:
    """Samples ζ ~ N(0, P⁻¹) by sample-then-optimise: ζ = P⁻¹ (√P₀ z₀ + Σ_g √c_g t_g), with their random numbers.

    z₀ and t_g are fixed while prior and noise change, so ζ changes smoothly, and the last ζ is a good initial value.
    Antorán et al. (2023), section 3.
    """

    prior: Float[Tensor, "k p"]  # z₀, standard normal
    data: Float[Tensor, "g k p"]  # t_g = Σ_n J_nᵀ S_g u_n at unit dispersion, u standard normal
    seed: int  # of the u
    zeta: Float[Tensor, "k p"]
    precisions: Float[Tensor, " p"]  # diagonal of the P₀ under which ζ was computed
    scales: Float[Tensor, " g"]  # the c_g under which ζ was computed

    def pull(self, precisions: Float[Tensor, " p"], scales: Float[Tensor, " g"]) -> Float[Tensor, "k p"]:
        """b = √P₀ z₀ + Σ_g √c_g t_g ~ N(0, P)."""
        return precisions.sqrt() * self.prior + torch.einsum("g,gkp->kp", scales.sqrt(), self.data)


def weight_deviations(
    precision: Precision, n: int, *, generator: torch.Generator, device: torch.device
) -> Float[Tensor, "n p"]:
    """n samples (n, p) from N(0, P⁻¹)."""
    return precision.draws(counted("n", n), generator=generator, device=device)


def copy_deviations(precision: SeparatePrecision, n: int, *, generator: torch.Generator) -> Float[Tensor, "n c p"]:
    """The same (n, c, p) if every output has its own copy of the weights."""
    sizes = (counted("n", n), len(precision.outputs), precision.p), (n, precision.n_tied)
    device = precision.P0.index.device
    eps, more = (
        torch.randn(size, generator=generator, dtype=torch.float64, device=generator.device).to(device)
        for size in sizes
    )
    return precision.copies(eps, more)
