"""log det(P P₀⁻¹) as a function of log precisions u_g and the log scale w of the curvature, with its derivatives.

With P = c H + diag δ, δ = e^u, c = e^w, Q = P⁻¹ c H and E_g the 0/1 diagonal of group g:

    γ_g = tr E_g Q,   T_gh = tr E_g Q E_h Q,   ∂ log det/∂u_g = −γ_g,   ∂γ_g/∂u_h = T_gh − [g = h] γ_g,

and ∂/∂w = −Σ_h ∂/∂u_h, since only the ratios c/δ matter. The blocks of a block-diagonal H contribute separate terms.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from lapwing._types import Float, Int, Scalar, Tensor
from lapwing.operators import (
    BlockDiagonalCurvature,
    Curvature,
    DenseCurvature,
    GroupedDiagonal,
    LowRankCurvature,
)

Dimensions = tuple[Float[Tensor, " g"], Float[Tensor, "g g"]]  # γ and T

_MOST_DENSE = 6_000  # parameters up to which a dense P⁻¹ is formed for the derivatives
_N_PROBES = 32  # random vectors per estimate of T
_MOST_KERNELS = 32  # groups up to which the kernel of each is stored


class Spectrum(NamedTuple):
    """Eigenvalues of H at unit dispersion whose eigenvectors lie within one group, and their multiplicities."""

    group: int
    eigenvalues: Float[Tensor, " k"]
    weights: Float[Tensor, " k"]


class LogDet(ABC):
    """log det(P P₀⁻¹), or the term of one block."""

    @abstractmethod
    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar: ...

    @abstractmethod
    def dimensions(self, u: Float[Tensor, " g"], w: Scalar) -> Dimensions:
        """γ and T, with small relative error also if a group is switched off (γ ≪ 1)."""


@dataclass(frozen=True, eq=False)
class SpectralLogDet(LogDet):
    """Every eigenvector of H lies within one group, so everything is elementwise, with q = c λ/(c λ + δ)."""

    eigenvalues: tuple[Float[Tensor, " _"], ...]  # of H at unit dispersion, by group
    weights: tuple[Float[Tensor, " _"], ...]  # multiplicities

    @classmethod
    def of(cls, spectra: Sequence[Spectrum], n_groups: int, empty: Float[Tensor, " 0"]) -> SpectralLogDet:
        """The spectra of several layers combined by group."""
        found = [[spectrum for spectrum in spectra if spectrum.group == g] for g in range(n_groups)]
        values = (torch.cat([empty, *(spectrum.eigenvalues for spectrum in own)]) for own in found)
        weights = (torch.cat([empty, *(spectrum.weights for spectrum in own)]) for own in found)
        return cls(tuple(values), tuple(weights))

    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar:
        ratios = (w - u).exp()
        return torch.stack(
            [n @ (values * r).log1p() for (values, n), r in zip(self._groups, ratios, strict=True)]
        ).sum()

    def dimensions(self, u: Float[Tensor, " g"], w: Scalar) -> Dimensions:
        ratios = (u - w).exp()
        qs = [(values / (values + r), n) for (values, n), r in zip(self._groups, ratios, strict=True)]
        return torch.stack([n @ q for q, n in qs]), torch.stack([(n * q) @ q for q, n in qs]).diag()

    @property
    def _groups(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.eigenvalues, self.weights, strict=True))


@dataclass(frozen=True, eq=False)
class KernelLogDet(LogDet):
    """H = MᵀM with fewer rows than columns: log det B, B = I + Σ_g A_g, A_g = (c/δ_g) M E_g Mᵀ.

    γ_g = tr B⁻¹A_g and T_gh = tr B⁻¹A_g B⁻¹A_h, by the matrix determinant lemma.
    """

    kernels: Float[Tensor, "k r r"]  # M E_g Mᵀ of the groups with parameters in H
    groups: Int[Tensor, " k"]
    estimates: bool = False  # estimate T stochastically: it only affects the length of Newton steps

    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar:
        return 2 * self.factor(u, w).diagonal().log().sum()

    def dimensions(self, u: Float[Tensor, " g"], w: Scalar) -> Dimensions:
        return self.dimensions_of(self.factor(u, w), u, w)

    def dimensions_of(self, L: Float[Tensor, "r r"], u: Float[Tensor, " g"], w: Scalar) -> Dimensions:
        """γ_g = tr B⁻¹A_g and T_gh = tr B⁻¹A_g B⁻¹A_h from the factor L of B."""
        inverse, scales = torch.cholesky_inverse(L), self._weights(u, w)
        own = scales * torch.einsum("ij,gij->g", inverse, self.kernels)
        gamma = torch.zeros_like(u).index_copy(0, self.groups, own)
        T = u.new_zeros(len(u), len(u))
        T[self.groups[:, None], self.groups] = (
            self._estimated(L, scales, own) if self.estimates else self._exact(inverse, scales)
        )
        return gamma, T

    def _exact(self, inverse: Float[Tensor, "r r"], scales: Float[Tensor, " k"]) -> Float[Tensor, "k k"]:
        each = scales[:, None, None] * (inverse @ self.kernels)  # B⁻¹A_g
        return torch.einsum("gij,hji->gh", each, each)

    def _estimated(self, L: Tensor, scales: Float[Tensor, " k"], own: Float[Tensor, " k"]) -> Float[Tensor, "k k"]:
        """E[y_gᵀy_h] with y_g = L⁻¹A_gL⁻ᵀ z: unbiased, positive semi-definite; its diagonal is limited to γ_g."""
        generator = torch.Generator().manual_seed(0)
        z = torch.randint(0, 2, (len(L), _N_PROBES), generator=generator).to(L) * 2 - 1
        z = torch.linalg.solve_triangular(L.T, z, upper=True)
        y = torch.linalg.solve_triangular(L, scales[:, None, None] * (self.kernels @ z), upper=False).flatten(1)
        T = y @ y.T / _N_PROBES
        shrink = (own / T.diagonal().clamp(min=1e-300)).clamp(max=1).sqrt()
        return shrink[:, None] * T * shrink

    def factor(self, u: Tensor, w: Tensor) -> Float[Tensor, "r r"]:
        """L Lᵀ = B."""
        return _factored(self._inner(u, w))

    def _inner(self, u: Tensor, w: Tensor) -> Float[Tensor, "r r"]:
        eye = torch.eye(self.kernels.shape[1], dtype=self.kernels.dtype, device=self.kernels.device)
        return eye + torch.einsum("g,gij->ij", self._weights(u, w), self.kernels)

    def _weights(self, u: Tensor, w: Tensor) -> Float[Tensor, " k"]:
        return (w - u)[self.groups].exp()


@dataclass(frozen=True, eq=False)
class DenseLogDet(LogDet):
    """H as a dense matrix, by way of P⁻¹."""

    H: Float[Tensor, "p p"]  # at unit dispersion
    index: Int[Tensor, " p"]

    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar:
        return self.logdet(self.factor(u, w), u)

    def logdet(self, L: Float[Tensor, "p p"], u: Float[Tensor, " g"]) -> Scalar:
        return (2 * L.diagonal().log() - u[self.index]).sum()

    def dimensions(self, u: Float[Tensor, " g"], w: Scalar) -> Dimensions:
        return self.dimensions_of(torch.cholesky_inverse(self.factor(u, w)), u, w)

    def factor(self, u: Float[Tensor, " g"], w: Scalar) -> Float[Tensor, "p p"]:
        """P = L Lᵀ."""
        return _factored(w.exp() * self.H + u.exp()[self.index].diag())

    def dimensions_of(self, cov: Float[Tensor, "p p"], u: Float[Tensor, " g"], w: Scalar) -> Dimensions:
        """γ_g = Σ_{i ∈ g} Q_ii and T_gh = Σ_{i ∈ g, j ∈ h} Q_ij Q_ji, with Q = Σ c H and Σ = `cov`."""
        delta = u.exp()[self.index]
        # Q = I − Σ diag δ, but 1 − Σ_ii δ_i cancels where δ is large; (Σ c H)_ii does not.
        diagonal = w.exp() * (cov * self.H).sum(1)
        Q_squared = (delta[:, None] * cov**2 * delta).diagonal_scatter(diagonal**2)
        return self.sums(diagonal, u), self.pairs(Q_squared, u)

    def sums(self, v: Float[Tensor, " p"], u: Tensor) -> Float[Tensor, " g"]:
        return torch.zeros_like(u).index_add(0, self.index, v)

    def pairs(self, M: Float[Tensor, "p p"], u: Tensor) -> Float[Tensor, "g g"]:
        """Sum of the entries of M over each pair of groups."""
        rows = M.new_zeros(len(u), len(M)).index_add(0, self.index, M)
        return M.new_zeros(len(u), len(u)).index_add(1, self.index, rows)


def _factored(B: Float[Tensor, "r r"]) -> Float[Tensor, "r r"]:
    """The Cholesky factor L; NaN if B is not positive definite to rounding, which a line search then avoids."""
    L, info = torch.linalg.cholesky_ex(B)
    return torch.where(info == 0, L, torch.nan)


def log_dets(H: Curvature, P0: GroupedDiagonal, *, estimates: bool = False) -> tuple[LogDet, ...] | None:
    """Terms whose sum is log det(P P₀⁻¹); None if a term has no closed form or is too expensive."""
    found = list(_terms(H, P0, torch.arange(P0.n_groups, device=P0.index.device)))
    found = [replace(term, estimates=estimates) if isinstance(term, KernelLogDet) else term for term in found]
    spectra = [term for term in found if isinstance(term, Spectrum)]
    others = [term for term in found if isinstance(term, LogDet)]
    if len(spectra) + len(others) < len(found):
        return None
    empty = torch.zeros(0, dtype=torch.float64, device=P0.index.device)
    return (*([SpectralLogDet.of(spectra, P0.n_groups, empty)] if spectra else []), *others)


def dense_log_det(H: Curvature, P0: GroupedDiagonal) -> DenseLogDet | None:
    return DenseLogDet(H.to_dense(), P0.index) if isinstance(H, DenseCurvature) and H.p <= _MOST_DENSE else None


def kernel_log_det(H: Curvature, P0: GroupedDiagonal, *, estimates: bool = False) -> KernelLogDet | None:
    if not isinstance(H, LowRankCurvature) or P0.n_groups > _MOST_KERNELS:
        return None
    return KernelLogDet(_kernels(H, P0), torch.arange(P0.n_groups, device=P0.index.device), estimates)


def _terms(H: Curvature, P0: GroupedDiagonal, groups: Int[Tensor, " g"]) -> Iterator[LogDet | Spectrum | None]:
    """`groups` are the numbers of P₀'s groups in the whole prior, as P₀ may be restricted to a block."""
    if P0.isotropic:
        yield Spectrum(int(groups), *H.weighted_spectrum())
    elif isinstance(H, BlockDiagonalCurvature):
        for s, block in zip(H.slices, H.blocks, strict=True):
            yield from _terms(block, P0.restricted(s), groups[P0.index[s].unique()])
    elif (axes := H.coordinates(P0)) is not None:
        for g, own in enumerate(axes.index == i for i in range(P0.n_groups)):
            yield Spectrum(int(groups[g]), axes.eigenvalues[own], axes.weights[own])
    elif isinstance(H, LowRankCurvature):
        yield KernelLogDet(_kernels(H, P0), groups) if P0.n_groups <= _MOST_KERNELS else None
    else:
        dense = dense_log_det(H, P0)
        yield None if dense is None else DenseLogDet(dense.H, groups[P0.index])


def _kernels(H: LowRankCurvature, P0: GroupedDiagonal) -> Float[Tensor, "g r r"]:
    half = H.scale.sqrt().expand(H.rank)
    scale = H.scale if not H.scale.ndim else half[:, None] * half
    return scale * H.root.group_kernels(P0)
