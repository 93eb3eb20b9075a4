"""Draws of weights from N(μ, P⁻¹)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.operators import Precision, SeparatePrecision
from lapwing.runtime.arguments import counted


@dataclass(frozen=True, eq=False)
class WeightDraws:
    """Draws ζ ~ N(0, P⁻¹) by sample-then-optimise: ζ = P⁻¹ (√P₀ z₀ + Σ_g √c_g t_g), and what they are made of.

    z₀ and t_g stay the same when prior and noise change, so that ζ moves smoothly with them and the last ζ is a good
    start for the next. Antorán et al. (2023), section 3.
    """

    prior: Float[Tensor, "k p"]  # z₀, standard normal
    data: Float[Tensor, "g k p"]  # t_g = Σ_n J_nᵀ S_g u_n at unit dispersion, u standard normal
    seed: int  # of the u
    zeta: Float[Tensor, "k p"]
    precisions: Float[Tensor, " p"]  # the diagonal of the P₀ that ζ belongs to
    scales: Float[Tensor, " g"]  # its c_g

    def pull(self, precisions: Float[Tensor, " p"], scales: Float[Tensor, " g"]) -> Float[Tensor, "k p"]:
        """b = √P₀ z₀ + Σ_g √c_g t_g ~ N(0, P)."""
        return precisions.sqrt() * self.prior + torch.einsum("g,gkp->kp", scales.sqrt(), self.data)


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
