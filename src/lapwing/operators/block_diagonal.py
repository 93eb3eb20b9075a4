"""Block-diagonal curvature: any structure for each contiguous block of parameters, zero between blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.coordinates import Coordinates
from lapwing.operators.grouped_diagonal import GroupedDiagonal


@dataclass(frozen=True, eq=False)
class BlockDiagonalCurvature(Curvature):
    """diag(H_1, …, H_B); the slices tile the parameters in order."""

    slices: tuple[slice, ...]
    blocks: tuple[Curvature, ...]

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.slices[-1].stop

    @property
    def exact_prior(self) -> bool:  # type: ignore[override]
        return all(H.exact_prior for H in self.blocks)

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return torch.cat([H.mv(v[..., s]) for s, H in zip(self.slices, self.blocks, strict=True)], dim=-1)

    def diagonal(self) -> Float[Tensor, " p"]:
        return torch.cat([H.diagonal() for H in self.blocks])

    def spectrum(self) -> Float[Tensor, " r"]:
        return torch.cat([H.spectrum() for H in self.blocks])

    def weighted_spectrum(self) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        values, weights = zip(*(H.weighted_spectrum() for H in self.blocks), strict=True)
        return torch.cat(values), torch.cat(weights)

    def trace(self) -> Scalar:
        return torch.stack([H.trace() for H in self.blocks]).sum()

    def scaled(self, c: Scalar) -> BlockDiagonalCurvature:
        return BlockDiagonalCurvature(self.slices, tuple(H.scaled(c) for H in self.blocks))

    def mixed(self, others: Sequence[BlockDiagonalCurvature], scales: Float[Tensor, " g"]) -> BlockDiagonalCurvature:
        # Blocks decide for themselves: KFAC blocks of the same data share A, low-rank blocks may become dense.
        columns = zip(self.blocks, *(other.blocks for other in others), strict=True)
        return BlockDiagonalCurvature(self.slices, tuple(first.mixed(rest, scales) for first, *rest in columns))

    def joined(self, others: Sequence[BlockDiagonalCurvature]) -> BlockDiagonalCurvature:
        columns = zip(self.blocks, *(other.blocks for other in others), strict=True)
        return BlockDiagonalCurvature(self.slices, tuple(first.joined(rest) for first, *rest in columns))

    def without(self, other: BlockDiagonalCurvature) -> BlockDiagonalCurvature:
        pairs = zip(self.blocks, other.blocks, strict=True)
        return BlockDiagonalCurvature(self.slices, tuple(H.without(less) for H, less in pairs))

    def plus(self, P0: GroupedDiagonal) -> BlockDiagonalPrecision:
        blocks = tuple(H.plus(P0.restricted(s)) for s, H in zip(self.slices, self.blocks, strict=True))
        return BlockDiagonalPrecision(self.slices, blocks)

    def unfactorised(self, P0: GroupedDiagonal) -> BlockDiagonalPrecision:
        blocks = tuple(H.unfactorised(P0.restricted(s)) for s, H in zip(self.slices, self.blocks, strict=True))
        return BlockDiagonalPrecision(self.slices, blocks)

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates | None:
        found = [H.coordinates(P0.restricted(s)) for s, H in zip(self.slices, self.blocks, strict=True)]
        if any(axes is None for axes in found):
            return None
        axes = [each for each in found if each is not None]
        # `restricted` renumbers the groups present in a block from zero in ascending order: map them back.
        groups = [P0.index[s].unique()[each.index] for s, each in zip(self.slices, axes, strict=True)]

        def rotate(v: Tensor) -> Tensor:
            return torch.cat([each.rotate(v[..., s]) for s, each in zip(self.slices, axes, strict=True)], dim=-1)

        eigenvalues, weights = (torch.cat(both) for both in zip(*((each.eigenvalues, each.weights) for each in axes)))
        return Coordinates(eigenvalues, torch.cat(groups), rotate, weights)

    def to_dense(self) -> Float[Tensor, "p p"]:
        return torch.block_diag(*(H.to_dense() for H in self.blocks))


@dataclass(frozen=True, eq=False)
class BlockDiagonalPrecision(Precision):
    """diag(P_1, …, P_B): every method is applied to the blocks, and the results concatenated or summed."""

    slices: tuple[slice, ...]
    blocks: tuple[Precision, ...]

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.slices[-1].stop

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._by_block(lambda P, part: P.mv(part), v)

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._by_block(lambda P, part: P.solve(part), v)

    def approximate_solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._by_block(lambda P, part: P.approximate_solve(part), v)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._by_block(lambda P, part: P.half_solve(part), eps)

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        return self._summed(lambda P, part: P.inv_quad(part), J)

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        return self._summed(lambda P, part: P.inv_quad_diagonal(part), J)

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        return self._summed(lambda P, part: P.inv_gram(part), J)

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return torch.cat([P.inv_diagonal() for P in self.blocks])

    def logdet(self) -> Scalar:
        return torch.stack([P.logdet() for P in self.blocks]).sum()

    def to_dense(self) -> Float[Tensor, "p p"]:
        return torch.block_diag(*(P.to_dense() for P in self.blocks))

    def _by_block(self, verb: Callable[[Precision, Tensor], Tensor], v: Tensor) -> Tensor:
        return torch.cat([verb(P, v[..., s]) for s, P in zip(self.slices, self.blocks, strict=True)], dim=-1)

    def _summed(self, verb: Callable[[Precision, Rows], Tensor], J: Rows) -> Tensor:
        # J P⁻¹ Jᵀ = Σ_b J_b P_b⁻¹ J_bᵀ. A generator, so that the result of one block at a time is in memory.
        return reduce(torch.add, (verb(P, J.columns(s)) for s, P in zip(self.slices, self.blocks, strict=True)))
