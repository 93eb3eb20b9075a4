"""Project all data on functions of selected points: all that their rows span, or the leading eigenfunctions (Nyström).

With points Z, K = J_Z P₀⁻¹ J_Zᵀ = U diag(λ) Uᵀ and A = U λ^-½, the weights V = P₀⁻¹ J_Zᵀ A are orthonormal in the
metric P₀, and φ(x) = J(x) V are the eigenfunctions of the kernel, extended from the points to all inputs. H becomes

    H_R = (P₀ V) (Vᵀ H V) (P₀ V)ᵀ = J_Zᵀ A (Σ_n φ_nᵀ Λ_n φ_n) Aᵀ J_Z,

a low-rank matrix whose rows are linear combinations of the points' rows. Other directions keep their prior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.accumulator import Accumulator, AccumulatorFactory
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

_LEAST = 1e-12  # eigenvalues below this share of the largest are rounding errors


@dataclass(frozen=True, eq=False)
class Subspace:
    """The points' rows J_Z (m, p) and the combinations A (m, r) that are orthonormal under the prior."""

    J: Jacobian
    A: Float[Tensor, "m r"]
    inverse: GroupedDiagonal  # P₀⁻¹

    @classmethod
    def spanned(cls, J: Jacobian, P0: GroupedDiagonal, rank: int | None) -> Subspace:
        """Spanned by all rows, or by the `rank` leading eigenfunctions of their kernel."""
        inverse = GroupedDiagonal(1 / P0.values.detach(), P0.index)
        values, U = torch.linalg.eigh(J.cross(J, inverse))
        first = int((values <= _LEAST * values[-1]).sum())
        first = first if rank is None else max(first, len(values) - rank)
        return cls(J, U[:, first:] / values[first:].sqrt(), inverse)

    def features(self, rows: Jacobian) -> Float[Tensor, "j r"]:
        """SᵀJ V = SᵀJ P₀⁻¹ J_Zᵀ A, the features φ (j, r) of j rows."""
        return rows.cross(self.J, self.inverse) @ self.A

    def rows(self, G: Float[Tensor, "r r"]) -> LowRankCurvature:
        """The curvature J_Zᵀ A G Aᵀ J_Z."""
        values, Q = torch.linalg.eigh(G)
        # G = Q diag(values) Qᵀ is positive semi-definite; negative values are rounding.
        return LowRankCurvature.of(CombinedRows(self.J, self.A @ (Q * values.clamp(min=0).sqrt())))


class ProjectedAccumulator(Accumulator):
    """Running G (r, r) = Σ φᵀΛφ over all data."""

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


class BoundedAccumulator(Accumulator):
    """The same with diag H: the lower bound of the evidence subtracts the trace of what the projection leaves out."""

    def __init__(self, subspace: Subspace) -> None:
        self.kept = ProjectedAccumulator(subspace)
        self.squares = torch.zeros(subspace.J.p, dtype=torch.float64, device=subspace.A.device)

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            self.kept.add([rows])
            self.squares += rows.sum_squares()

    def result(self) -> BlockDiagonalCurvature:
        """G (r, r) and diag H (p,) as the two blocks of one value."""
        r, p = len(self.kept.G), len(self.squares)
        # Two blocks of different sizes travel over ranks as one block-diagonal value; `_in_weights` takes it apart.
        return BlockDiagonalCurvature(
            (slice(0, r), slice(r, r + p)), (self.kept.result(), DiagonalCurvature(self.squares))
        )


@dataclass(frozen=True, eq=False)
class Projected(AccumulatorFactory):
    """Accumulate in the subspace. Sums over ranks have its size, and are expressed in the weights afterwards."""

    subspace: Subspace
    kind: Callable[[Subspace], Accumulator]

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return self.kind(self.subspace)

    def sum_over_ranks(self, parts: Sequence[Curvature]) -> Sequence[Curvature]:
        return [self._in_weights(part) for part in super().sum_over_ranks(parts)]

    def _in_weights(self, part: Curvature) -> Curvature:
        if isinstance(part, BlockDiagonalCurvature):
            G, squares = part.blocks
            return BoundedCurvature(self.subspace.rows(G.to_dense()), squares.diagonal())
        return self.subspace.rows(part.to_dense())


@dataclass(frozen=True, eq=False)
class Precomputed(AccumulatorFactory):
    """Parts that are already computed, for all data: the pass then computes the fit statistics only."""

    parts: tuple[Curvature, ...]
    whole_data = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return _ConstantAccumulator(self.parts[0])

    def accumulators(self, n_parts: int, layout: ParamLayout, device: torch.device) -> list[Accumulator]:
        return [_ConstantAccumulator(part) for part in self.parts]

    def sum_over_ranks(self, parts: Sequence[Curvature]) -> Sequence[Curvature]:
        return self.parts


class _ConstantAccumulator(Accumulator):
    """Ignores rows. It does not iterate over them, so they are never computed."""

    def __init__(self, part: Curvature) -> None:
        self.part = part

    def add(self, pieces: Iterable[Jacobian]) -> None:
        """Nothing to add; the rows are a lazy iterable."""

    def result(self) -> Curvature:
        return self.part
