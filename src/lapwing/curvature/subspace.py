"""All data seen through a few functions: those that the rows of chosen points span, or the leading ones among them.

With Z the points, K = J_Z P₀⁻¹ J_Zᵀ = U diag(λ) Uᵀ and A = U λ^-½, the weights V = P₀⁻¹ J_Zᵀ A are orthonormal in P₀,
and φ(x) = J(x) V are the eigenfunctions of the kernel, extended from the points to all inputs (Nyström). H becomes

    H_R = (P₀ V) (Vᵀ H V) (P₀ V)ᵀ = J_Zᵀ A (Σ_n φ_nᵀ Λ_n φ_n) Aᵀ J_Z:

rows that are combinations of the points' rows. Directions outside keep their prior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.summation import Accumulator, Summation
from lapwing.network.jacobian import Jacobian
from lapwing.network.parameters import ParamLayout
from lapwing.operators import (
    BlockDiagonalCurvature,
    BoundedCurvature,
    CombinedRows,
    Curvature,
    DenseCurvature,
    DiagonalCurvature,
    GroupedDiagonal,
    LowRankCurvature,
)

_LEAST = 1e-12  # of the largest eigenvalue: smaller ones are rounding


@dataclass(frozen=True, eq=False)
class Subspace:
    """The points' rows J_Z and the combinations A that are orthonormal under the prior."""

    J: Jacobian
    A: Float[Tensor, "m r"]
    inverse: GroupedDiagonal  # P₀⁻¹

    @classmethod
    def spanned(cls, J: Jacobian, P0: GroupedDiagonal, rank: int | None) -> Subspace:
        """By all rows, or by the leading eigenfunctions of their kernel."""
        inverse = GroupedDiagonal(1 / P0.values.detach(), P0.index)
        values, U = torch.linalg.eigh(J.cross(J, inverse))
        first = int((values <= _LEAST * values[-1]).sum())
        first = first if rank is None else max(first, len(values) - rank)
        return cls(J, U[:, first:] / values[first:].sqrt(), inverse)

    def features(self, rows: Jacobian) -> Float[Tensor, "j r"]:
        """SᵀJ V."""
        return rows.cross(self.J, self.inverse) @ self.A

    def rows(self, G: Float[Tensor, "r r"]) -> LowRankCurvature:
        """J_Zᵀ A G Aᵀ J_Z."""
        values, Q = torch.linalg.eigh(G)
        return LowRankCurvature.of(CombinedRows(self.J, self.A @ (Q * values.clamp(min=0).sqrt())))


class ProjectedSum(Accumulator):
    """Σ φᵀΛφ over all data."""

    def __init__(self, subspace: Subspace) -> None:
        self.subspace = subspace
        r = subspace.A.shape[1]
        self.G = torch.zeros(r, r, dtype=torch.float64, device=subspace.A.device)

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            phi = self.subspace.features(rows)
            self.G.addmm_(phi.T, phi)

    def result(self) -> DenseCurvature:
        return DenseCurvature.of(self.G)


class BoundedSum(Accumulator):
    """The same, with the diagonal of the whole H: what is left out enters the evidence."""

    def __init__(self, subspace: Subspace) -> None:
        self.kept = ProjectedSum(subspace)
        self.squares = torch.zeros(subspace.J.p, dtype=torch.float64, device=subspace.A.device)

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            self.kept.add([rows])
            self.squares += rows.sum_squares()

    def result(self) -> BlockDiagonalCurvature:
        r, p = len(self.kept.G), len(self.squares)
        return BlockDiagonalCurvature(
            (slice(0, r), slice(r, r + p)), (self.kept.result(), DiagonalCurvature(self.squares))
        )


@dataclass(frozen=True, eq=False)
class Projected(Summation):
    """Rows seen through a subspace. What is summed over ranks has its size, and becomes rows of weights afterwards."""

    subspace: Subspace
    kind: Callable[[Subspace], Accumulator]

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return self.kind(self.subspace)

    def together(self, parts: Sequence[Curvature]) -> Sequence[Curvature]:
        return [self._in_weights(part) for part in super().together(parts)]

    def _in_weights(self, part: Curvature) -> Curvature:
        if isinstance(part, BlockDiagonalCurvature):
            G, squares = part.blocks
            return BoundedCurvature(self.subspace.rows(G.to_dense()), squares.diagonal())
        return self.subspace.rows(part.to_dense())


@dataclass(frozen=True, eq=False)
class Given(Summation):
    """Parts that are there already, of all data: rows are not even formed."""

    parts: tuple[Curvature, ...]
    whole_data = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return _Nothing(self.parts[0])

    def accumulators(self, n_parts: int, layout: ParamLayout, device: torch.device) -> list[Accumulator]:
        return [_Nothing(part) for part in self.parts]

    def together(self, parts: Sequence[Curvature]) -> Sequence[Curvature]:
        return self.parts


class _Nothing(Accumulator):
    def __init__(self, part: Curvature) -> None:
        self.part = part

    def add(self, pieces: Iterable[Jacobian]) -> None:
        """Rows come when they are asked for; nobody asks."""

    def result(self) -> Curvature:
        return self.part
