"""One factory per operator: the operator, the dense matrix it stands for, and a prior diagonal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.jacobian import DenseBlock, Jacobian, LinearBlock
from lapwing.operators import (
    BlockDiagonalCurvature,
    Curvature,
    DenseCurvature,
    DiagonalCurvature,
    GroupedDiagonal,
    LowRankCurvature,
)

Made = tuple[Curvature, Tensor, GroupedDiagonal]


def randn(*shape: int, g: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def prior(p: int, n_groups: int, g: torch.Generator) -> GroupedDiagonal:
    """Groups of unequal size, interleaved."""
    index = torch.randint(n_groups, (p,), generator=g)
    index[:n_groups] = torch.arange(n_groups)
    return GroupedDiagonal(torch.rand(n_groups, generator=g, dtype=torch.float64) + 0.2, index)


def jacobian(n: int, c: int, g: torch.Generator, positions: int = 1) -> tuple[Jacobian, Tensor]:
    """A linear layer 3 → 2 with bias (8 parameters) followed by 4 loose ones, as blocks and dense."""
    a, s = randn(n, positions, 3, g=g), randn(n, c, positions, 2, g=g)
    loose = randn(n, c, 4, g=g)
    blocks = (LinearBlock(slice(0, 6), slice(6, 8), a, s), DenseBlock(slice(8, 12), loose))
    weight = torch.stack(
        [sum(torch.outer(s[i, k, t], a[i, t]) for t in range(positions)).flatten() for i in range(n) for k in range(c)]
    ).reshape(n, c, 6)
    dense = torch.cat([weight, s.sum(2), loose], -1)
    return Jacobian(blocks, n, c, 12, torch.device("cpu")), dense


def dense(seed: int) -> Made:
    g = torch.Generator().manual_seed(seed)
    M = randn(7, 12, g=g)  # rank 7 of 12: H is singular
    return DenseCurvature.of(M.T @ M).scaled(torch.tensor(0.7, dtype=torch.float64)), 0.7 * M.T @ M, prior(12, 3, g)


def dense_isotropic(seed: int) -> Made:
    H, matrix, _ = dense(seed)
    return H, matrix, prior(12, 1, torch.Generator().manual_seed(seed))


def diagonal(seed: int) -> Made:
    g = torch.Generator().manual_seed(seed)
    h = torch.rand(12, generator=g, dtype=torch.float64)
    h[3] = 0
    return DiagonalCurvature(h), h.diag(), prior(12, 3, g)


def low_rank(seed: int) -> Made:
    g = torch.Generator().manual_seed(seed)
    rows, J = jacobian(2, 3, g)
    M = J.reshape(-1, 12)
    return LowRankCurvature.of(rows).scaled(torch.tensor(1.7, dtype=torch.float64)), 1.7 * M.T @ M, prior(12, 3, g)


def low_rank_isotropic(seed: int) -> Made:
    H, matrix, _ = low_rank(seed)
    return H, matrix, prior(12, 1, torch.Generator().manual_seed(seed))


def low_rank_elementwise(seed: int) -> Made:
    """More prior groups than the cached kernels hold."""
    g = torch.Generator().manual_seed(seed)
    rows, J = jacobian(2, 2, g, positions=3)
    M = J.reshape(-1, 12)
    values = torch.rand(12, generator=g, dtype=torch.float64) + 0.2
    P0 = GroupedDiagonal(values, torch.randperm(12, generator=g))
    return LowRankCurvature.of(rows), M.T @ M, P0


def low_rank_mixed(seed: int) -> Made:
    """Two parts with scales of their own: one scale per row."""
    g = torch.Generator().manual_seed(seed)
    (rows, J), (more, K) = jacobian(2, 1, g), jacobian(3, 1, g)
    scales = torch.tensor([0.3, 2.0], dtype=torch.float64)
    M, N = J.reshape(-1, 12), K.reshape(-1, 12)
    H = LowRankCurvature.of(rows).mixed([LowRankCurvature.of(more)], scales)
    return H, 0.3 * M.T @ M + 2.0 * N.T @ N, prior(12, 2, g)


def block_diagonal(seed: int) -> Made:
    g = torch.Generator().manual_seed(seed)
    A, h = randn(5, 8, g=g), torch.rand(4, generator=g, dtype=torch.float64)
    H = BlockDiagonalCurvature((slice(0, 8), slice(8, 12)), (DenseCurvature.of(A.T @ A), DiagonalCurvature(h)))
    return H, torch.block_diag(A.T @ A, h.diag()), prior(12, 3, g)


MAKERS: list[Callable[[int], Made]] = [
    dense,
    dense_isotropic,
    diagonal,
    low_rank,
    low_rank_isotropic,
    low_rank_elementwise,
    low_rank_mixed,
    block_diagonal,
]
