"""What makes a weight worth its place in a subnetwork.

With independent weights of variances v, dropping all but S costs W₂² = Σ_{d ∉ S} v_d, so the k largest variances are
the best choice (Daxberger et al., 2021). That says nothing about outputs; `Functional` looks at those instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lapwing._types import Bool, Float, Tensor
from lapwing.subnetwork.candidates import Candidates


class Score(ABC):
    """One number per weight; the largest are taken."""

    words: str

    @abstractmethod
    def of(self, candidates: Candidates) -> Float[Tensor, " p"]: ...

    def dead(self, candidates: Candidates) -> Bool[Tensor, " p"] | None:
        """Weights to be ranked behind all others; None where the score does not know of any."""
        return None


class _WithoutDead(Score):
    """Scores that have seen the curvature.

    A weight of a dead unit has H_dd = 0 and the largest variance there is, 1/δ, but no effect on any datum: such
    weights come last.
    """

    def dead(self, candidates: Candidates) -> Bool[Tensor, " p"]:
        return candidates.curvature == 0


@dataclass(frozen=True)
class MarginalVariance(_WithoutDead):
    """1 / (H_dd + δ_d), the variance of the diagonal Laplace posterior."""

    words = "the largest marginal variance (diagonal Laplace)"

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        return candidates.variance


@dataclass(frozen=True)
class Functional(_WithoutDead):
    """Σ_n Σ_c J_ncd² / (H_dd + δ_d): how much of the outputs' variance comes from the weight alone. Lapwing's own."""

    words = "the largest share in the variance of the outputs"

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        return candidates.squared_jacobian * candidates.variance


@dataclass(frozen=True)
class Magnitude(Score):
    """|θ_d|."""

    words = "the largest magnitude"

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        return candidates.linearised.theta.abs()


@dataclass(frozen=True, eq=False)
class RandomScore(Score):
    """Uniform, without replacement."""

    generator: torch.Generator

    words = "chance"

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        scores = torch.rand(candidates.layout.p, generator=self.generator, dtype=torch.float64)
        return scores.to(candidates.linearised.network.device)
