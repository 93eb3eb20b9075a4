"""Total variation as a prior over smoothness: TV-PredCP, with the expected total variation in closed form.

Of one block, with covariance S(ℓ, v) of images around x̂, every difference of neighbours is Gaussian,
d_e ~ N(m_e, q_e), so

    κ = Σ_e E|d_e| = Σ_e [ √(2 q_e/π) exp(−m_e²/(2 q_e)) + m_e erf(m_e/√(2 q_e)) ]
    ∂κ/∂q_e = exp(−m_e²/(2 q_e))/√(2π q_e)

and the exponential prior that total variation implies for κ gives  log p(ℓ) = log λ − λ κ + log |dκ/d log ℓ|.
Nalisnick, Gordon and Hernández-Lobato (2021); Antorán et al. (2022), who estimate κ by samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.imaging.distances import NUGGET, Taps

_LEAST = 1e-14  # of q_e
_SWEPT = torch.logspace(-2, 2, 81, dtype=torch.float64)  # length scales at which κ must rise or fall throughout


@dataclass(frozen=True, eq=False)
class BlockVariation:
    """The differences of one block: q = v Σ_r exp(−r/ℓ) D_r (and the nugget), m from the reconstruction.

    `weight` stands for the differences that were not looked at, where only some of them are.
    """

    name: str
    index: int  # of the block in the prior
    grid: Taps
    D: Float[Tensor, "r e"]
    m: Float[Tensor, " e"]
    weight: float = 1.0

    def kappa(self, log_v: Scalar, log_l: Scalar) -> Scalar:
        """E TV(x) under the block's prior."""
        q = self._variances(log_v, log_l)
        terms = (2 * q / pi).sqrt() * torch.exp(-self.m.square() / (2 * q)) + self.m * torch.erf(
            self.m / (2 * q).sqrt()
        )
        return self.weight * terms.sum()

    def slope(self, log_v: Scalar, log_l: Scalar) -> Scalar:
        """dκ/d log ℓ."""
        q = self._variances(log_v, log_l)
        density = torch.exp(-self.m.square() / (2 * q)) / (2 * pi * q).sqrt()
        r = self.grid.distances
        rate = log_v.exp() * ((r * (-log_l).exp() * torch.exp(-r * (-log_l).exp())) @ self.D)
        return self.weight * (density * rate).sum()

    def monotone(self, log_v: Scalar) -> bool:
        """Whether κ only rises, or only falls, along the swept length scales."""
        with torch.no_grad():
            kappa = torch.stack([self.kappa(log_v, log_l) for log_l in _SWEPT.log()])
        steps = kappa.diff()
        small = 1e-9 * kappa.abs().max()
        return bool((steps >= -small).all()) or bool((steps <= small).all())

    def _variances(self, log_v: Scalar, log_l: Scalar) -> Float[Tensor, " e"]:
        r = self.grid.distances
        q = log_v.exp() * ((torch.exp(-r * (-log_l).exp()) + NUGGET * (r == 0)) @ self.D)
        return q.clamp(min=_LEAST)


@dataclass(frozen=True, eq=False)
class VariationPrior:
    """The term that TV-PredCP adds to the objective: Σ_b rate · κ_b − jacobian · log |dκ_b/d log ℓ_b|."""

    blocks: tuple[BlockVariation, ...]
    rate: float
    jacobian: float

    def __call__(self, settings: list[tuple[Tensor, Tensor | None]]) -> Scalar:
        total = settings[0][0].new_zeros(())
        for block in self.blocks:
            log_v, log_l = settings[block.index]
            assert log_l is not None
            slope = block.slope(log_v, log_l).abs().clamp(min=1e-300)
            total = total + self.rate * block.kappa(log_v, log_l) - self.jacobian * slope.log()
        return total

    def not_monotone(self, settings: list[tuple[Tensor, Tensor | None]]) -> tuple[str, ...]:
        return tuple(b.name for b in self.blocks if not b.monotone(settings[b.index][0]))


def rates(how: str, gamma: float, m: int, noise_var: float) -> tuple[float, float]:
    """(weight of κ, weight of the log-Jacobian).

    "consistent": the rate γ m / (2 σ²) that the reconstruction's loss implies, and 1. "released": γ m for both, as in
    the code of Antorán et al. (2022).
    """
    if how == "released":
        return gamma * m, gamma * m
    return gamma * m / (2 * noise_var), 1.0
