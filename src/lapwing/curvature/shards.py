"""Curvature of data that are spread over ranks: a sum over data is summed over ranks as well.

    H = Σ_r H_r

Matrices and factors are all-reduced entry by entry, rows are gathered. Every rank ends up with identical bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lapwing.operators import (
    BlockDiagonalCurvature,
    Curvature,
    DenseCurvature,
    KroneckerCurvature,
    LowRankCurvature,
)
from lapwing.runtime import distributed


def over_ranks(parts: Sequence[Curvature], before: Sequence[Curvature] = ()) -> list[Curvature]:
    """The parts summed over all ranks, from those of this rank (empty if it has no data).

    `before`: parts of the first pass. Blocks that a second pass took over from them are already summed over ranks.
    """
    if not distributed.is_distributed():
        return list(parts)
    if before:
        return _second_pass(parts, before)
    holders = [r for r, has in enumerate(distributed.gathered(bool(parts))) if has]
    if not holders:
        return []
    own = list(leaves(parts))
    frame = list(parts)
    if len(holders) < distributed.world_size():  # ranks without data learn the shapes from another
        others = distributed.broadcast(frame, holders[0])
        frame = frame or others
    flat = [H if own else None for H in leaves(frame)]
    # All ranks must agree: a rank without data has no rows of its own to count.
    as_matrix = _too_many_rows([_n_rows(H) for H in flat], [H.p for H in leaves(frame)])
    shared = [_as_matrix(H) if dense else H for H, dense in zip(leaves(frame), as_matrix, strict=True)]
    # The order of collectives must be the same on all ranks: all sums first, then all rows.
    sums = iter(distributed.sums([t for H in shared if H.sums_over_ranks for t in H.addends()] if own else None))
    rows = iter(zip(*distributed.gathered([H if own else None for H in shared if not H.sums_over_ranks]), strict=True))
    found = [H.with_sums(sums) if H.sums_over_ranks else _joined_rows(next(rows)) for H in shared]
    whole = iter(found)
    joined = [_rebuilt(part, whole) for part in frame]
    if len(joined) == 1:
        decompose_together(found)
    return joined


def _second_pass(parts: Sequence[Curvature], before: Sequence[Curvature]) -> list[Curvature]:
    old = {id(H) for H in leaves(before)}
    new = iter(over_ranks([H for H in leaves(parts) if id(H) not in old]))
    whole = iter([H if id(H) in old else next(new) for H in leaves(parts)])
    return [_rebuilt(part, whole) for part in parts]


def decompose_together(blocks: Sequence[Curvature]) -> None:
    """Eigendecompose all Kronecker factors: each by one rank, the result broadcast to all."""
    kron = [H.factors for H in blocks if isinstance(H, KroneckerCurvature)]
    eigens = [eigen for factors in kron for eigen in (factors.eigen_A, factors.eigen_B) if not eigen.known]
    if not eigens or not distributed.is_distributed():
        return
    shapes = [eigen.packed_shape for eigen in eigens]
    found = distributed.split_work([float(q * k * d**2) for q, k, d in shapes], lambda i: eigens[i].packed(), shapes)
    for eigen, both in zip(eigens, found, strict=True):
        eigen.know_packed(both.to(eigen.held.device))


def leaves(parts: Sequence[Curvature]) -> Iterator[Curvature]:
    """All curvatures that are not block-diagonal themselves, depth first."""

    for H in parts:
        yield from leaves(H.blocks) if isinstance(H, BlockDiagonalCurvature) else [H]


def _rebuilt(H: Curvature, found: Iterator[Curvature]) -> Curvature:
    if isinstance(H, BlockDiagonalCurvature):
        return replace(H, blocks=tuple(_rebuilt(block, found) for block in H.blocks))
    return next(found)


def _n_rows(H: Curvature | None) -> float:
    """Rows that represent this H. A dense matrix counts as infinitely many, so that the sum becomes dense."""
    if isinstance(H, DenseCurvature):
        return float("inf")
    return H.rank if isinstance(H, LowRankCurvature) else 0


def _too_many_rows(n_rows: list[float], p: list[int]) -> list[bool]:
    """For each curvature, whether the rows of all ranks together outnumber its parameters: then a matrix is smaller."""
    together = [sum(column) for column in zip(*distributed.gathered(n_rows), strict=True)]
    return [n >= size for n, size in zip(together, p, strict=True)]


def _as_matrix(H: Curvature) -> Curvature:
    return DenseCurvature.of(H.to_dense()) if isinstance(H, LowRankCurvature) else H


def _joined_rows(parts: Sequence[Curvature | None]) -> Curvature:
    first, *rest = [H for H in parts if H is not None]
    return first.joined(rest)
