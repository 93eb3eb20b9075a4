"""One factory per operator: the operator, the dense matrix it stands for, and a prior diagonal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing.linalg import CG, Sketch, UnitVectors
from lapwing.network.jacobian import DenseBlock, FactorBlock, Given, Jacobian
from lapwing.operators import (
    Arrangement,
    Basis,
    BlockDiagonalCurvature,
    Curvature,
    Damping,
    DenseCurvature,
    DenseRows,
    DiagonalCurvature,
    EigenCurvature,
    ExactDamping,
    GroupedDiagonal,
    KroneckerCurvature,
    KroneckerFactors,
    Leading,
    LeadingEigen,
    LowRankCurvature,
    MatrixFreeCurvature,
    MatrixProducts,
    SplitDamping,
)

Made = tuple[Curvature, Tensor, GroupedDiagonal]
Rows = Callable[..., tuple[Jacobian, Tensor]]


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
    with_one = torch.cat([a, a.new_ones(n, positions, 1)], -1)[:, :, None]
    arrangement = Arrangement(1, 2, slice(0, 6), slice(6, 8), (1, 2, 3), (0, 1, 2))
    factors = FactorBlock(arrangement, s[:, :, :, None], Given(with_one))
    blocks = (factors, DenseBlock(slice(8, 12), loose))
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


def low_rank_eigenvectors(seed: int) -> Made:
    """Rows without factors, as eigenvectors are."""
    g = torch.Generator().manual_seed(seed)
    M = randn(5, 12, g=g)
    return (
        LowRankCurvature.of(DenseRows(M)).scaled(torch.tensor(1.7, dtype=torch.float64)),
        1.7 * M.T @ M,
        prior(12, 3, g),
    )


def block_diagonal(seed: int) -> Made:
    g = torch.Generator().manual_seed(seed)
    A, h = randn(5, 8, g=g), torch.rand(4, generator=g, dtype=torch.float64)
    H = BlockDiagonalCurvature((slice(0, 8), slice(8, 12)), (DenseCurvature.of(A.T @ A), DiagonalCurvature(h)))
    return H, torch.block_diag(A.T @ A, h.diag()), prior(12, 3, g)


# --- Kronecker: W (q, o, i) of 12 entries, one prior precision ---------------------------------------------------
#
# All seeds share A, or the eigenbasis: two curvatures of one estimator add up only when they came from the same
# inputs. What happens when they did not has tests of its own.

JOINT = Arrangement(1, 3, slice(0, 9), slice(9, 12), (1, 3, 3), (0, 1, 2))  # a linear layer 3 → 3 with bias
GROUPS = Arrangement(2, 2, slice(0, 8), slice(8, 12), (2, 2, 2, 1), (0, 2, 1, 3))  # two groups, kept (q · in, o, k)


def positions(arrangement: Arrangement) -> Tensor:
    """(q, o, i): where W[q, o, i] stands among the 12 entries, written out for the two layers above."""
    if arrangement is JOINT:
        return torch.tensor([[[0, 1, 2, 9], [3, 4, 5, 10], [6, 7, 8, 11]]])
    # Weight (q · in, o) = (4, 2) in front of the bias (4,): the order of a transposed convolution with two groups.
    return torch.tensor([[[0, 2, 8], [1, 3, 9]], [[4, 6, 10], [5, 7, 11]]])


def one_layer(arrangement: Arrangement) -> Rows:
    """Rows of that layer alone, as factors and dense."""

    def make(n: int, c: int, g: torch.Generator, n_positions: int = 1) -> tuple[Jacobian, Tensor]:
        place = positions(arrangement)
        q, o, i = place.shape
        a, s = randn(n, n_positions, q, i, g=g), randn(n, c, n_positions, q, o, g=g)
        a[..., -1] = 1
        dense = torch.zeros(n, c, 12, dtype=torch.float64)
        for t in range(n_positions):
            dense[..., place] += s[:, :, t, :, :, None] * a[:, None, t, :, None, :]
        return Jacobian((FactorBlock(arrangement, s, Given(a)),), n, c, 12, torch.device("cpu")), dense

    return make


def spread(blocks: Tensor, place: Tensor) -> Tensor:
    """One (o · i)² matrix per group, at its place among the 12 entries."""
    H = torch.zeros(12, 12, dtype=torch.float64)
    for block, at in zip(blocks, place.flatten(1)):
        H[at[:, None], at] = block
    return H


def factors(arrangement: Arrangement, seed: int) -> tuple[Tensor, Tensor]:
    """A (q, i, i), the same for every seed, and B (q, o, o); both singular."""
    q, o, i = positions(arrangement).shape
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    a, b = randn(q, i, i - 1, g=fixed), randn(q, o, o - 1, g=g)
    return a @ a.mT, b @ b.mT


def kronecker_with(arrangement: Arrangement, damping: Damping, seed: int) -> Made:
    A, B = factors(arrangement, seed)
    count, scale = 5.0, torch.tensor(0.6, dtype=torch.float64)
    H = KroneckerCurvature("layer", arrangement, KroneckerFactors(count * A, count, B), scale, damping)
    blocks = torch.stack([0.6 * torch.kron(B_q, A_q) for A_q, B_q in zip(A, B)])
    return H, spread(blocks, positions(arrangement)), prior(12, 1, torch.Generator().manual_seed(seed))


def kronecker(seed: int) -> Made:
    return kronecker_with(JOINT, ExactDamping(), seed)


def kronecker_groups(seed: int) -> Made:
    return kronecker_with(GROUPS, ExactDamping(), seed)


def leading_inputs(arrangement: Arrangement) -> tuple[LeadingEigen, Tensor]:
    """A = U diag(s) Uᵀ + ρ (I − U Uᵀ) with all but two of its directions in ρ, the same for every seed; and dense."""
    q, _, i = positions(arrangement).shape
    g = torch.Generator().manual_seed(96)
    U, values = torch.linalg.qr(randn(q, i, i - 2, g=g)).Q, torch.rand(q, i - 1, generator=g, dtype=torch.float64) + 0.1
    inside = U @ U.mT
    A = (U * values[:, None, :-1]) @ U.mT + values[:, -1:, None] * (torch.eye(i).double() - inside)
    return LeadingEigen.decomposed(values, U, Leading(rank=i - 1), 5.0), A


def kronecker_leading_with(arrangement: Arrangement, B: Tensor, B_factor: Any, seed: int) -> Made:
    A, A_dense = leading_inputs(arrangement)
    scale = torch.tensor(0.6, dtype=torch.float64)
    H = KroneckerCurvature("layer", arrangement, KroneckerFactors(A, 5.0, B_factor), scale, ExactDamping())
    blocks = torch.stack([0.6 * torch.kron(B_q, A_q) for A_q, B_q in zip(A_dense, B)])
    return H, spread(blocks, positions(arrangement)), prior(12, 1, torch.Generator().manual_seed(seed))


def kronecker_leading(seed: int) -> Made:
    """Only leading directions of A are kept."""
    _, B = factors(GROUPS, seed)
    return kronecker_leading_with(GROUPS, B, B, seed)


def kronecker_leading_outputs(seed: int) -> Made:
    """And of B, from a sketch. Two such B add up exactly, as their sum has no more directions than the sketch."""
    b = randn(1, 3, 1, g=torch.Generator().manual_seed(seed))
    B = b @ b.mT
    return kronecker_leading_with(JOINT, B, LeadingEigen(Sketch.of(B, 2), Leading(rank=2)), seed)


def kronecker_split(seed: int) -> Made:
    """Not among MAKERS: its precision is not H + P₀."""
    return kronecker_with(GROUPS, SplitDamping(), seed)


def eigenbases() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(98)
    return tuple(torch.linalg.qr(randn(2, d, d, g=g)).Q for d in (3, 2))  # type: ignore[return-value]


SHARED_BASIS = Basis(*eigenbases())


def eigen(seed: int) -> Made:
    g = torch.Generator().manual_seed(seed)
    s = torch.rand(2, 2, 3, generator=g, dtype=torch.float64)
    s[0, 1, 2] = 0
    H = EigenCurvature("layer", GROUPS, SHARED_BASIS, s)
    U = [torch.kron(U_B, U_A) for U_A, U_B in zip(*eigenbases())]
    blocks = torch.stack([U_q @ s_q.flatten().diag() @ U_q.T for U_q, s_q in zip(U, s)])
    return H, spread(blocks, positions(GROUPS)), prior(12, 1, g)


def kronecker_and_dense(seed: int) -> Made:
    """A linear layer 3 → 2 with bias and four loose parameters, each block with a precision of its own."""
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(97)
    a, b, M = randn(1, 4, 6, g=fixed), randn(1, 2, 3, g=g), randn(3, 4, g=g)
    A, B = a @ a.mT, b @ b.mT
    arrangement = Arrangement(1, 2, slice(0, 6), slice(6, 8), (1, 2, 3), (0, 1, 2))
    one = torch.ones((), dtype=torch.float64)
    first = KroneckerCurvature("layer", arrangement, KroneckerFactors(A, 1.0, B), one, ExactDamping())
    H = BlockDiagonalCurvature((slice(0, 8), slice(8, 12)), (first, DenseCurvature.of(M.T @ M)))
    order = torch.tensor([0, 1, 2, 6, 3, 4, 5, 7])  # row by row of W, the bias behind each
    K = torch.zeros(8, 8, dtype=torch.float64)
    K[order[:, None], order] = torch.kron(B[0], A[0])
    P0 = GroupedDiagonal(torch.rand(2, generator=g, dtype=torch.float64) + 0.2, torch.tensor([0] * 8 + [1] * 4))
    return H, torch.block_diag(K, M.T @ M), P0


class DenseProducts(MatrixProducts):
    """Parts H_g that are there as matrices, handed out as products only."""

    device = torch.device("cpu")

    def __init__(self, *roots: Tensor) -> None:
        self.roots, self.p, self.n_parts = roots, roots[0].shape[1], len(roots)

    def mv(self, v: Tensor, scales: Tensor) -> Tensor:
        return sum(c * (v @ M.T) @ M for c, M in zip(scales, self.roots, strict=True))

    def draws(self, n: int, scales: Tensor, generator: torch.Generator) -> Tensor:
        drawn = [c.sqrt() * randn(n, len(M), g=generator) @ M for c, M in zip(scales, self.roots, strict=True)]
        return torch.stack(drawn).sum(0)

    def diagonals(self) -> Tensor:
        return torch.stack([(M**2).sum(0) for M in self.roots])


def matrix_free_with(near: Curvature, *roots: Tensor, **options: Any) -> MatrixFreeCurvature:
    options = {"solver": CG(rtol=1e-13), "probes": UnitVectors(), **options}
    return MatrixFreeCurvature((DenseProducts(*roots),), torch.ones(len(roots), dtype=torch.float64), near, **options)


def matrix_free(seed: int) -> Made:
    """Not among MAKERS: its eigenvalues are not known. Preconditioned by its diagonal."""
    g = torch.Generator().manual_seed(seed)
    M, c = randn(7, 12, g=g), torch.tensor(0.7, dtype=torch.float64)
    return matrix_free_with(DiagonalCurvature((M**2).sum(0)), M).scaled(c), 0.7 * M.T @ M, prior(12, 3, g)


def matrix_free_kronecker(seed: int) -> Made:
    """Preconditioned by Kronecker factors that can take one precision only, under a prior of three."""
    g = torch.Generator().manual_seed(seed)
    M, near = randn(7, 12, g=g), kronecker(seed)[0]
    blocks = BlockDiagonalCurvature((slice(0, 12),), (near,))
    return matrix_free_with(blocks, M), M.T @ M, prior(12, 3, g)


def matrix_free_parts(seed: int) -> Made:
    """Two parts with scales of their own."""
    g = torch.Generator().manual_seed(seed)
    M, N = randn(4, 12, g=g), randn(5, 12, g=g)
    H = matrix_free_with(DenseCurvature.of(M.T @ M), M, N)
    scales = torch.tensor([0.4, 1.8], dtype=torch.float64)
    return replace(H, scales=scales), 0.4 * M.T @ M + 1.8 * N.T @ N, prior(12, 2, g)


MATRIX_FREE: list[Callable[[int], Made]] = [matrix_free, matrix_free_kronecker, matrix_free_parts]

MAKERS: list[Callable[[int], Made]] = [
    dense,
    dense_isotropic,
    diagonal,
    low_rank,
    low_rank_isotropic,
    low_rank_elementwise,
    low_rank_mixed,
    low_rank_eigenvectors,
    block_diagonal,
    kronecker,
    kronecker_groups,
    kronecker_leading,
    kronecker_leading_outputs,
    eigen,
    kronecker_and_dense,
]


def rows_for(make: Callable[[int], Made]) -> Rows:
    """Rows an operator can work with: a layer's own where it stands for one layer."""
    own = {kronecker: JOINT, kronecker_leading_outputs: JOINT}
    own |= {kronecker_groups: GROUPS, kronecker_leading: GROUPS, eigen: GROUPS}
    return one_layer(own[make]) if make in own else jacobian
