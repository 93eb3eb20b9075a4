"""The covariance of a filter's taps, C_pq = exp(−‖p − q‖/ℓ), as a sum over the few distances that occur.

    C(ℓ) = Σ_r exp(−r/ℓ) E_r,   E_r the 0/1 matrix of the pairs at distance r

so that J C(ℓ) Jᵀ = Σ_r exp(−r/ℓ) J E_r Jᵀ, whose matrices J E_r Jᵀ do not depend on ℓ. E_r commutes with the
reflections of the grid (and with its transposition, if it is square): in a basis of even and odd filters it falls into
small blocks, and all products J E_r Jᵀ come from the inner products of those parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg import add_gram_, mirror_

NUGGET = 1e-6  # of the variance, added to the diagonal of C
_SLAB = 1 << 21  # numbers of J that are worked on at a time


@dataclass(frozen=True, eq=False)
class Sector:
    """Filters of one symmetry: `vectors` (copies, d, taps); E_r acts on the d in the same way in every copy."""

    vectors: Float[Tensor, "copies d k"]

    def entries(self, E: Float[Tensor, "r k k"]) -> Float[Tensor, "r d d"]:
        """E_r in this basis."""
        u = self.vectors[0]
        return u @ E @ u.T


@dataclass(frozen=True, eq=False)
class Taps:
    """The distances of a filter's grid, the matrices E_r, and the sectors that they fall into."""

    distances: Float[Tensor, " r"]
    classes: Float[Tensor, "r k k"]
    sectors: tuple[Sector, ...]

    def covariance(self, length: Float[Tensor, ""]) -> Float[Tensor, "k k"]:
        """C(ℓ) with its nugget."""
        C = torch.tensordot(torch.exp(-self.distances / length), self.classes, 1)
        return C + NUGGET * torch.eye(len(C), dtype=C.dtype)


@lru_cache(maxsize=64)
def taps(kernel: tuple[int, ...]) -> Taps:
    """Of filters of these sizes; () is a single tap."""
    kernel = kernel or (1,)
    grid = torch.tensor(list(product(*(range(size) for size in kernel))), dtype=torch.float64)
    squared = (grid[:, None] - grid[None]).square().sum(-1).round().long()
    found = squared.unique()
    classes = torch.stack([(squared == s).double() for s in found])
    return Taps(found.double().sqrt(), classes, tuple(_sectors(kernel)))


def class_grams(J: Float[Tensor, "n f k"], kernel: tuple[int, ...]) -> Float[Tensor, "r n n"]:
    """G_r = Σ_f J_f E_r J_fᵀ for every distance r, in float64.

    A 3 × 3 filter takes 14 products over filters, each of half a symmetric matrix, where the six E_r would take 54.
    """
    n, n_filters, k = J.shape
    grid = taps(kernel)
    totals = [[_zeros(n) for _ in _pairs(sector)] for sector in grid.sectors]
    step = max(1, _SLAB // (n * k))
    for start in range(0, n_filters, step):
        slab = J[:, start : start + step].double()
        for sector, sums in zip(grid.sectors, totals, strict=True):
            for copy in sector.vectors:
                parts = (copy @ slab.reshape(-1, k).T).reshape(len(copy), n, -1)
                for (i, j), total in zip(_pairs(sector), sums, strict=True):
                    add_gram_(total, (parts[i] if i == j else parts[i] + parts[j]).T)
    return _combined(grid, totals)


def class_squares(J: Float[Tensor, "n f k"], kernel: tuple[int, ...]) -> Float[Tensor, "r n"]:
    """The diagonals of those matrices: Σ_f J_nf E_r J_nfᵀ."""
    n, n_filters, k = J.shape
    grid = taps(kernel)
    out = torch.zeros(len(grid.distances), n, dtype=torch.float64)
    step = max(1, _SLAB // (n * k))
    for start in range(0, n_filters, step):
        slab = J[:, start : start + step].double().reshape(-1, k).T
        for sector in grid.sectors:
            e = sector.entries(grid.classes)
            for copy in sector.vectors:
                parts = (copy @ slab).reshape(len(copy), n, -1)
                for i, j in _pairs(sector):
                    both = torch.einsum("nf,nf->n", parts[i], parts[j])
                    out += (1 if i == j else 2) * e[:, i, j, None] * both
    return out


def _combined(grid: Taps, totals: list[list[Tensor]]) -> Float[Tensor, "r n n"]:
    """Σ_ij (E_r)_ij Q_ij, the mixed Q_ij + Q_ji being Q_(i+j) − Q_ii − Q_jj."""
    n = len(totals[0][0])
    G = torch.zeros(len(grid.distances), n, n, dtype=torch.float64)
    for sector, sums in zip(grid.sectors, totals, strict=True):
        e = sector.entries(grid.classes)
        pairs = list(_pairs(sector))
        for (i, j), Q in zip(pairs, sums, strict=True):
            mirror_(Q)
            if i == j:  # e_ii less what the mixed products have counted
                weights = 2 * e[:, i, i] - e[:, i].sum(1)
            else:
                weights = e[:, i, j]
            for r, weight in enumerate(weights.tolist()):
                if abs(weight) > 1e-14:
                    G[r].add_(Q, alpha=weight)
    return G


def _pairs(sector: Sector) -> Iterator[tuple[int, int]]:
    d = sector.vectors.shape[1]
    return ((i, j) for i in range(d) for j in range(i, d))


def _zeros(n: int) -> Float[Tensor, "n n"]:
    return torch.zeros(n, n, dtype=torch.float64)


def _sectors(kernel: tuple[int, ...]) -> Iterator[Sector]:
    """Products of even and odd vectors along each axis; of a square grid also (anti)symmetric in the two axes."""
    parities = [_parities(size) for size in kernel]
    if len(kernel) != 2 or kernel[0] != kernel[1]:
        for choice in product(*parities):
            vectors = torch.ones(1, 1, dtype=torch.float64)
            for basis in choice:
                vectors = _products(vectors, basis)
            if len(vectors):
                yield Sector(vectors[None])
        return
    even, odd = parities[0]
    for basis in (even, odd):
        yield from (Sector(v[None]) for v in _transposed(basis) if len(v))
    if len(even) and len(odd):
        yield Sector(torch.stack([_products(even, odd), _products(odd, even, swap=True)]))


def _transposed(basis: Float[Tensor, "d s"]) -> Iterator[Float[Tensor, "_ k"]]:
    """Symmetric and antisymmetric products of the basis with itself."""
    d = len(basis)
    outer = torch.einsum("ip,jq->ijpq", basis, basis)
    symmetric = [outer[i, j] + outer[j, i] for i in range(d) for j in range(i, d)]
    antisymmetric = [outer[i, j] - outer[j, i] for i in range(d) for j in range(i + 1, d)]
    for some in (symmetric, antisymmetric):
        stacked = torch.stack(some).flatten(1) if some else basis.new_zeros(0, basis.shape[1] ** 2)
        yield stacked / stacked.norm(dim=1, keepdim=True)


def _products(left: Tensor, right: Tensor, *, swap: bool = False) -> Tensor:
    """All products of a vector of one axis with a vector of the next; `swap` orders them by the second."""
    outer = torch.einsum("ip,jq->ijpq", left, right)
    return (outer.transpose(0, 1) if swap else outer).reshape(len(left) * len(right), left.shape[1] * right.shape[1])


def _parities(size: int) -> tuple[Float[Tensor, "_ s"], Float[Tensor, "_ s"]]:
    """Orthonormal even and odd vectors on a line of `size` points."""
    eye = torch.eye(size, dtype=torch.float64)
    half = size // 2
    mirrored = eye.flip(0)
    even = (eye[:half] + mirrored[:half]) / 2**0.5
    odd = (eye[:half] - mirrored[:half]) / 2**0.5
    return (torch.cat([even, eye[half : half + 1]]) if size % 2 else even), odd
