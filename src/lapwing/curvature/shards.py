"""Curvature of data that are spread over ranks: what is a sum over data is summed over ranks as well.

    H = Σ_r H_r

Matrices and factors are summed entry by entry, rows are gathered; every rank ends up with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lapwing._types import Tensor
from lapwing.operators import (
    BlockDiagonalCurvature,
    Curvature,
    DenseCurvature,
    KroneckerCurvature,
    LowRankCurvature,
)
from lapwing.runtime import distributed


def over_ranks(parts: Sequence[Curvature], before: Sequence[Curvature] = ()) -> list[Curvature]:
    """The parts of all data; those of this process are given, none when it has no data.

    Blocks that a second pass has taken over from the parts `before` it are those of all data already.
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
    if len(holders) < distributed.world_size():  # those without data learn what it is that they have nothing of
        others = distributed.broadcast(frame, holders[0])
        frame = frame or others
    flat = [H if own else None for H in leaves(frame)]
    as_matrix = _too_many_rows([_n_rows(H) for H in flat], [H.p for H in leaves(frame)])
    shared = [_as_matrix(H) if dense else H for H, dense in zip(leaves(frame), as_matrix, strict=True)]
    sums = iter(distributed.sums([t for H in shared if H.additive for t in H.addends()] if own else None))
    rows = iter(zip(*distributed.gathered([H if own else None for H in shared if not H.additive]), strict=True))
    found = [H.with_sums(sums) if H.additive else _stacked(next(rows)) for H in shared]
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
    """Eigenvectors of all Kronecker factors, each found by one rank and kept by all."""
    kron = [H.factors for H in blocks if isinstance(H, KroneckerCurvature)]
    eigens = [eigen for factors in kron for eigen in (factors.eigen_A, factors.eigen_B) if not eigen.known]
    if not eigens or not distributed.is_distributed():
        return
    shapes = [torch.Size((len(e.held), e.held.shape[-1] + 1, e.held.shape[-1])) for e in eigens]

    def decomposed(i: int) -> Tensor:
        values, U = eigens[i].pair
        return torch.cat([values[:, None], U.double()], 1)

    found = distributed.split_work([float(q * d**3) for q, _, d in shapes], decomposed, shapes)
    for eigen, both in zip(eigens, found, strict=True):
        both = both.to(eigen.held.device)
        eigen.know(both[:, 0], both[:, 1:])


def leaves(parts: Sequence[Curvature]) -> Iterator[Curvature]:
    for H in parts:
        yield from leaves(H.blocks) if isinstance(H, BlockDiagonalCurvature) else [H]


def _rebuilt(H: Curvature, found: Iterator[Curvature]) -> Curvature:
    if isinstance(H, BlockDiagonalCurvature):
        return replace(H, blocks=tuple(_rebuilt(block, found) for block in H.blocks))
    return next(found)


def _n_rows(H: Curvature | None) -> float:
    """How many rows stand for this H; a matrix stands for more than can be counted."""
    if isinstance(H, DenseCurvature):
        return float("inf")
    return H.rank if isinstance(H, LowRankCurvature) else 0


def _too_many_rows(n_rows: list[float], p: list[int]) -> list[bool]:
    """Which of the curvatures kept as rows are better kept as a matrix, once all ranks' rows come together."""
    together = [sum(column) for column in zip(*distributed.gathered(n_rows), strict=True)]
    return [n >= size for n, size in zip(together, p, strict=True)]


def _as_matrix(H: Curvature) -> Curvature:
    return DenseCurvature.of(H.to_dense()) if isinstance(H, LowRankCurvature) else H


def _stacked(parts: Sequence[Curvature | None]) -> Curvature:
    first, *rest = [H for H in parts if H is not None]
    return first.joined(rest)
