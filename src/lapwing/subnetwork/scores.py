"""Scores by which the weights of a subnetwork are selected.

With independent weights of variances v, keeping only S costs W₂² = Σ_{d ∉ S} v_d, so the k largest variances are
optimal in the weights (Daxberger et al., 2021). That does not consider outputs; `Functional` does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lapwing._types import Bool, Float, Tensor
from lapwing.subnetwork.candidates import Candidates


class Score(ABC):
    """One number per weight; the weights with the largest are selected."""

    words: str  # for the description of the selection

    @abstractmethod
    def of(self, candidates: Candidates) -> Float[Tensor, " p"]: ...

    def dead(self, candidates: Candidates) -> Bool[Tensor, " p"] | None:
        """Weights (p,) to rank behind all others; None if the score does not use the curvature."""
        return None


class _WithoutDead(Score):
    """Scores that use the curvature, and can tell dead weights.

    A weight of a dead unit (H_dd = 0) has the largest possible variance, 1/δ, but no effect on any datum. It is ranked
    last.
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
    """Σ_n Σ_c J_ncd² / (H_dd + δ_d): the variance of the outputs due to this weight alone. Not from a paper."""

    words = "the largest share in the variance of the outputs"

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        return candidates.squared_jacobian * candidates.variance


@dataclass(frozen=True)
class Magnitude(Score):
    """|θ_d|, as in magnitude pruning."""

    words = "the largest magnitude"

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        return candidates.linearised.theta.abs()


@dataclass(frozen=True, eq=False)
class RandomScore(Score):
    """Uniformly at random, without replacement."""

    generator: torch.Generator

    words = "chance"

    def of(self, candidates: Candidates) -> Float[Tensor, " p"]:
        scores = torch.rand(candidates.layout.p, generator=self.generator, dtype=torch.float64)
        return scores.to(candidates.linearised.network.device)
