"""A low-rank approximation H_R of the curvature H, with a bound on the log determinant that accounts for H − H_R.

    log det(I + P₀⁻¹H) ≤ log det(I + P₀⁻¹H_R) + tr P₀⁻¹(H − H_R),

since the log determinant is concave and H_R is H under a P₀-orthogonal projection. The resulting
marginal likelihood is a lower bound, as in Titsias (2009) with Λ in place of the inverse noise variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.low_rank import LowRankCurvature


@dataclass(frozen=True, eq=False)
class BoundedCurvature(Curvature):
    """H_R (`kept`), and the diagonal of the full H (`whole`)."""

    kept: Curvature
    whole: Float[Tensor, " p"]
    exact_prior = False

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.kept.p

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.kept.mv(v)

    def diagonal(self) -> Float[Tensor, " p"]:
        return self.kept.diagonal()

    def spectrum(self) -> Float[Tensor, " r"]:
        return self.kept.spectrum()

    def scaled(self, c: Scalar) -> BoundedCurvature:
        return BoundedCurvature(self.kept.scaled(c), c * self.whole)

    def mixed(self, others: Sequence[Curvature], scales: Float[Tensor, " g"]) -> BoundedCurvature:
        parts = [self, *(H for H in others if isinstance(H, BoundedCurvature))]
        kept = self.kept.mixed([H.kept for H in parts[1:]], scales)
        return replace(self, kept=kept, whole=scales.to(self.whole) @ torch.stack([H.whole for H in parts]))

    def plus(self, P0: GroupedDiagonal) -> BoundedPrecision:
        return BoundedPrecision(self, self.kept.plus(P0), P0)

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.kept.to_dense()

    def left_out(self, P0: GroupedDiagonal) -> Scalar:
        """The trace term tr P₀⁻¹(H − H_R) of the bound."""
        inverse = P0.inverse()
        whole = (P0.group_sums(self.whole) / P0.values).sum()
        if isinstance(self.kept, LowRankCurvature):  # tr P₀⁻¹MᵀM = tr M P₀⁻¹Mᵀ
            return whole - (self.kept.scale * self.kept.root.kernel(inverse).diagonal()).sum()
        return whole - (self.kept.diagonal() * inverse.diagonal).sum()


@dataclass(frozen=True, eq=False)
class BoundedPrecision(Precision):
    """H_R + P₀ in every method except `logdet`, which is the upper bound."""

    H: BoundedCurvature
    kept: Precision
    P0: GroupedDiagonal

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.H.p

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.kept.mv(v)

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.kept.solve(v)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.kept.half_solve(eps)

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        return self.kept.inv_quad(J)

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        return self.kept.inv_quad_diagonal(J)

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        return self.kept.inv_gram(J)

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return self.kept.inv_diagonal()

    def logdet(self) -> Scalar:
        """log det(H_R + P₀) + tr P₀⁻¹(H − H_R) ≥ log det(H + P₀)."""
        return self.kept.logdet() + self.H.left_out(self.P0)

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.kept.to_dense()
