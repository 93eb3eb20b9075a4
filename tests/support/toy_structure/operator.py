"""H = diag(h_t of each tensor t): every entry of a tensor has the mean of its curvatures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Int, Scalar, Tensor
from lapwing.operators import Curvature, GroupedDiagonal, Precision, Rows


@dataclass(frozen=True, eq=False)
class LevelCurvature(Curvature):
    levels: Float[Tensor, " t"]
    tensor_of: Int[Tensor, " p"]

    @property
    def p(self) -> int:  # type: ignore[override]
        return len(self.tensor_of)

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.diagonal() * v

    def diagonal(self) -> Float[Tensor, " p"]:
        return self.levels[self.tensor_of]

    def spectrum(self) -> Float[Tensor, " p"]:
        return self.diagonal()

    def scaled(self, c: Scalar) -> LevelCurvature:
        return replace(self, levels=c * self.levels)

    def mixed(self, others: Sequence[LevelCurvature], scales: Float[Tensor, " g"]) -> LevelCurvature:
        return replace(self, levels=scales @ torch.stack([H.levels for H in (self, *others)]))

    def plus(self, P0: GroupedDiagonal) -> LevelPrecision:
        return LevelPrecision(self.diagonal() + P0.diagonal)

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.diagonal().diag()


@dataclass(frozen=True, eq=False)
class LevelPrecision(Precision):
    entries: Float[Tensor, " p"]

    @property
    def p(self) -> int:  # type: ignore[override]
        return len(self.entries)

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.entries * v

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return v / self.entries

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return eps * self.entries.rsqrt()

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        return J.quad(1 / self.entries)

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        return J.quad_diagonal(1 / self.entries)

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        return J.cross(J, GroupedDiagonal(1 / self.entries, torch.arange(self.p)))

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return 1 / self.entries

    def logdet(self) -> Scalar:
        return self.entries.log().sum()

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.entries.diag()
