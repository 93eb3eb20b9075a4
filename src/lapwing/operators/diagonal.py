"""Diagonal curvature: H = c diag(h)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.conditioning import require_semidefinite
from lapwing.operators.coordinates import Coordinates
from lapwing.operators.grouped_diagonal import GroupedDiagonal


@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """H = diag(h), h ≥ 0. For very large networks the entries, and all results, are float32."""

    entries: Float[Tensor, " p"]
    sums_over_ranks = True

    @property
    def p(self) -> int:  # type: ignore[override]
        return len(self.entries)

    def addends(self) -> tuple[Tensor, ...]:
        return (self.entries,)

    def with_sums(self, sums: Iterator[Tensor]) -> DiagonalCurvature:
        return replace(self, entries=next(sums))

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.entries * v

    def diagonal(self) -> Float[Tensor, " p"]:
        return self.entries

    def spectrum(self) -> Float[Tensor, " p"]:
        return self.entries

    def scaled(self, c: Scalar) -> DiagonalCurvature:
        same = not c.requires_grad and float(c) == 1  # avoids a copy of P entries
        return self if same else replace(self, entries=c * self.entries)

    def mixed(self, others: Sequence[DiagonalCurvature], scales: Float[Tensor, " g"]) -> DiagonalCurvature:
        return replace(self, entries=scales @ torch.stack([h.entries for h in (self, *others)]))

    def without(self, other: DiagonalCurvature) -> DiagonalCurvature:
        left = self.entries - other.entries
        require_semidefinite(left, self.entries)
        return replace(self, entries=left.clamp(min=0))  # negative by rounding only

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates:
        return Coordinates(self.entries, P0.index, lambda v: v, torch.ones_like(self.entries))

    def plus(self, P0: GroupedDiagonal) -> DiagonalPrecision:
        return DiagonalPrecision(_shifted(self.entries, P0))

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.entries.diag()


def _shifted(entries: Float[Tensor, " p"], P0: GroupedDiagonal) -> Float[Tensor, " p"]:
    """h + P₀; a single prior precision is broadcast, not expanded to P entries first."""
    return entries + (P0.values[0] if P0.isotropic else P0.diagonal.to(entries.dtype))


@dataclass(frozen=True, eq=False)
class DiagonalPrecision(Precision):
    """P = diag(d), d > 0. Every method is elementwise."""

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
        every = torch.arange(self.p, device=self.entries.device)
        return J.cross(J, GroupedDiagonal(1 / self.entries, every))

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return 1 / self.entries

    def logdet(self) -> Scalar:
        return self.entries.log().sum(dtype=torch.float64)  # a float32 sum over millions of entries loses digits

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.entries.diag()
