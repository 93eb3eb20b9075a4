"""Dense curvature: the full (P, P) matrix H."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.conditioning import require_factored, require_resolved, require_semidefinite
from lapwing.operators.coordinates import Coordinates
from lapwing.operators.grouped_diagonal import GroupedDiagonal


@dataclass(frozen=True, eq=False)
class SymmetricMatrix:
    """A symmetric positive semi-definite matrix with cached eigendecomposition."""

    entries: Float[Tensor, "p p"]

    @cached_property
    def eigenvalues(self) -> Float[Tensor, " p"]:
        # clamp: rounding may make the zero eigenvalues of a singular H slightly negative.
        # `eigenbasis` computes eigenvalues too, but they differ in the last bits. Reusing them would make results
        # depend on which property was accessed first.
        return torch.linalg.eigvalsh(self.entries).clamp(min=0)

    @cached_property
    def eigenbasis(self) -> tuple[Float[Tensor, " p"], Float[Tensor, "p p"]]:
        values, Q = torch.linalg.eigh(self.entries)
        return values.clamp(min=0), Q


@dataclass(frozen=True, eq=False)
class DenseCurvature(Curvature):
    """c H. Scaled copies share the unscaled matrix and its cached eigenvalues."""

    unit: SymmetricMatrix
    scale: Scalar
    sums_over_ranks = True

    @classmethod
    def of(cls, H: Float[Tensor, "p p"]) -> DenseCurvature:
        return cls(SymmetricMatrix(H), torch.ones((), dtype=H.dtype, device=H.device))

    @property
    def p(self) -> int:  # type: ignore[override]
        return len(self.unit.entries)

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.scale * (v @ self.unit.entries)

    def diagonal(self) -> Float[Tensor, " p"]:
        return self.scale * self.unit.entries.diagonal()

    def spectrum(self) -> Float[Tensor, " p"]:
        return self.scale * self.unit.eigenvalues

    def scaled(self, c: Scalar) -> DenseCurvature:
        return replace(self, scale=c * self.scale)

    def mixed(self, others: Sequence[Curvature], scales: Float[Tensor, " g"]) -> DenseCurvature:
        parts = (self, *others)
        return DenseCurvature.of(reduce(torch.add, (c * H.to_dense() for c, H in zip(scales, parts, strict=True))))

    def without(self, other: Curvature) -> DenseCurvature:
        left = DenseCurvature.of(self.to_dense() - other.to_dense())
        require_semidefinite(torch.linalg.eigvalsh(left.unit.entries), self.spectrum())
        return left

    def addends(self) -> tuple[Tensor, ...]:
        return (self.to_dense(),)

    def with_sums(self, sums: Iterator[Tensor]) -> DenseCurvature:
        return DenseCurvature.of(next(sums))

    def plus(self, P0: GroupedDiagonal) -> DensePrecision:
        return DensePrecision(self, P0)

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates | None:
        if not P0.isotropic:
            return None
        values, Q = self.unit.eigenbasis
        return Coordinates(self.scale * values, P0.index, lambda v: v @ Q, torch.ones_like(values))

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.scale * self.unit.entries


@dataclass(frozen=True, eq=False)
class DensePrecision(Precision):
    """P = c H + P₀ = L Lᵀ; the Cholesky factor is computed on first use."""

    H: DenseCurvature
    P0: GroupedDiagonal

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.H.p

    @cached_property
    def factor(self) -> Float[Tensor, "p p"]:
        P = self.to_dense()
        L, info = torch.linalg.cholesky_ex(P)
        if int(info):
            values = torch.linalg.eigvalsh(P.detach())
            # Cholesky failed, so the smallest eigenvalue is zero up to rounding; eigvalsh may return a positive one.
            require_resolved(min(float(values[0]), 0.0), float(values[-1]), self.p, self.P0)
        require_factored(P.detach(), L.detach(), self.P0)
        return L

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.H.mv(v) + self.P0.diagonal * v

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return torch.cholesky_solve(v.reshape(v.shape[:-1].numel(), self.p).T, self.factor).T.reshape(v.shape)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        # P⁻¹ = L⁻ᵀ L⁻¹, so R = L⁻ᵀ.
        flat = eps.reshape(eps.shape[:-1].numel(), self.p).T
        return torch.linalg.solve_triangular(self.factor.T, flat, upper=True).T.reshape(eps.shape)

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        W = self._whitened(J).reshape(J.n, J.c, self.p)
        return W @ W.mT

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        return (self._whitened(J) ** 2).sum(-1).reshape(J.n, J.c)

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        W = self._whitened(J)
        return W @ W.T

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return torch.cholesky_inverse(self.factor).diagonal()

    def logdet(self) -> Scalar:
        if self.P0.isotropic:  # log det(cH + δI) = Σ log(c λ + δ): one eigendecomposition serves every δ and c
            values = self.H.spectrum() + self.P0.values
            if self.p:
                require_resolved(float(values.detach().min()), float(values.detach().max()), self.p, self.P0)
            return values.log().sum()
        return 2 * self.factor.diagonal().log().sum()

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.H.to_dense() + self.P0.diagonal.diag()

    def _whitened(self, J: Rows) -> Float[Tensor, "nc p"]:
        """(L⁻¹ Jᵀ)ᵀ = J L⁻ᵀ, so that J P⁻¹ Jᵀ is its Gram matrix."""
        return torch.linalg.solve_triangular(self.factor, J.dense().flatten(0, 1).T, upper=False).T
