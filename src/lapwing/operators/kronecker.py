"""Kronecker-factored curvature (KFAC) of a layer: H = B ⊗ A for row-major W (out, in), for q parallel maps.

A is the mean of a aᵀ over data and positions (a: layer inputs), B the sum of g Λ gᵀ (g: output gradients). In the
eigenbasis U_B ⊗ U_A the precision is diagonal: every method is a rotation and an elementwise operation, and a new prior
needs no new eigendecomposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import NumericalError, StructureError
from lapwing.linalg import products_on_grid
from lapwing.operators.arrangement import Arrangement
from lapwing.operators.base import Curvature
from lapwing.operators.conditioning import require_semidefinite
from lapwing.operators.coordinates import Coordinates
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.kronecker_factors import Basis, Damping, KroneckerFactors
from lapwing.operators.rotated import RotatedPrecision, one_precision

_DOWNDATED = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative rounding error of eigenvalues after a downdate
_MANY_PRODUCTS = 1 << 14  # eigenvalues a_i b_j of a map from which their sums are computed on a grid


@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """c · (B ⊗ A) for one layer."""

    name: str
    arrangement: Arrangement
    factors: KroneckerFactors
    scale: Scalar
    damping: Damping
    sums_over_ranks = True

    @property
    def p(self) -> int:  # type: ignore[override]
        return sum(s.stop - s.start for s in self.arrangement.slices)

    @property
    def exact_prior(self) -> bool:  # type: ignore[override]
        return self.damping.adds

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        W = self.arrangement.matrices(v)
        A, B = self.factors.A.to(W.dtype), self.factors.B_sum.to(W.dtype)
        return self.arrangement.flat(self.scale * (B @ W @ A), self.p)

    def diagonal(self) -> Float[Tensor, " p"]:
        b, a = self.factors.eigen_B.diagonal(), self.factors.eigen_A.diagonal() / self.factors.count
        return self.arrangement.flat(self.scale * b[:, :, None] * a[:, None, :], self.p)

    def spectrum(self) -> Float[Tensor, " p"]:
        return self.scale * (self.factors.b[:, :, None] * self.factors.a[:, None, :]).flatten()

    def weighted_spectrum(self) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        a, b = self.factors.a, self.factors.b
        if a.shape[1] * b.shape[1] < _MANY_PRODUCTS:  # for few products the exact sum is faster than the grid
            return super().weighted_spectrum()
        values, weights = zip(*(products_on_grid(*maps) for maps in zip(a, b, strict=True)), strict=True)
        return self.scale * torch.cat(values), torch.cat(weights)

    def trace(self) -> Scalar:
        # tr(B ⊗ A) = tr B · tr A per map, without eigendecompositions
        b, a = (eigen.diagonal().sum(-1) for eigen in (self.factors.eigen_B, self.factors.eigen_A))
        return self.scale * (b * a).sum() / self.factors.count

    def scaled(self, c: Scalar) -> KroneckerCurvature:
        return replace(self, scale=c * self.scale)

    def mixed(self, others: Sequence[KroneckerCurvature], scales: Float[Tensor, " g"]) -> KroneckerCurvature:
        # Parts of one pass share A: only B adds up. Curvatures of other data add to the sum and the count of A too.
        parts = (self, *others)
        B_sum = _weighted_sum((c * H.scale, H.factors.B_sum) for c, H in zip(scales, parts, strict=True))
        if all(H.factors.same_inputs(self.factors) for H in others):
            factors = KroneckerFactors(self.factors.eigen_A, self.factors.count, B_sum)
        else:
            A_sum = reduce(torch.add, (H.factors.A_sum for H in parts))
            factors = KroneckerFactors(A_sum, sum(H.factors.count for H in parts), B_sum)
        return replace(self, factors=factors, scale=torch.ones_like(self.scale))

    def joined(self, others: Sequence[KroneckerCurvature]) -> KroneckerCurvature:
        """Unlike `mixed`, treats the others as different data even if their A happens to be equal."""
        parts = (self, *others)
        B_sum = _weighted_sum((H.scale, H.factors.B_sum) for H in parts)
        A_sum, count = reduce(torch.add, (H.factors.A_sum for H in parts)), sum(H.factors.count for H in parts)
        return replace(self, factors=KroneckerFactors(A_sum, count, B_sum), scale=torch.ones_like(self.scale))

    def without(self, other: KroneckerCurvature) -> KroneckerCurvature:
        count = self.factors.count - other.factors.count
        if count <= 0:
            raise NumericalError(f"Block '{self.name}': nothing would be left of its data.")
        A_sum = self.factors.A_sum - other.factors.A_sum
        B_sum = self.scale * self.factors.B_sum - other.scale * other.factors.B_sum
        # B ⊗ A of the difference is positive semi-definite if both factors are, so check them separately.
        for left, whole in ((A_sum, self.factors.a * self.factors.count), (B_sum, self.scale * self.factors.b)):
            require_semidefinite(torch.linalg.eigvalsh(left.double()), whole, _DOWNDATED[left.dtype])
        return replace(self, factors=KroneckerFactors(A_sum, count, B_sum), scale=torch.ones_like(self.scale))

    def addends(self) -> tuple[Tensor, ...]:
        """Σ a aᵀ, its count, and c Σ g Λ gᵀ."""
        # A layer that this rank's data did not pass through has a default count of 1, which must not be added.
        seen = self.factors.count > 1 or bool(self.factors.eigen_A.diagonal().any())
        count = torch.tensor(self.factors.count * seen, dtype=torch.float64)
        return self.factors.A_sum, count, self.scale * self.factors.B_sum

    def with_sums(self, sums: Iterator[Tensor]) -> KroneckerCurvature:
        A_sum, count, B_sum = next(sums), next(sums), next(sums)
        kept = self.factors.eigen_A.dtype, self.factors.eigen_B.dtype  # sums over ranks are computed in float64
        factors = KroneckerFactors(A_sum.to(kept[0]), max(float(count), 1.0), B_sum.to(kept[1]))
        return replace(self, factors=factors, scale=torch.ones_like(self.scale))

    def plus(self, P0: GroupedDiagonal) -> RotatedPrecision:
        a, b, delta = self.factors.a, self.scale * self.factors.b, one_precision(P0, self.name)
        return RotatedPrecision(self.arrangement, self.factors.basis, lambda: self.damping.eigenvalues(a, b, delta))

    def unfactorised(self, P0: GroupedDiagonal) -> RotatedPrecision:
        layer, factors = self.arrangement, self.factors
        # The factors have the shape of their eigenvectors: cloned, they take the memory that those will take.
        basis = Basis(factors.A_sum.clone(), factors.B_sum.clone())
        return RotatedPrecision(layer, basis, lambda: P0.values.new_ones(layer.q, layer.o, layer.i))

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates | None:
        if not P0.isotropic or not self.exact_prior:
            return None
        rotate = self.factors.basis.rotate
        return Coordinates(self.spectrum(), P0.index, lambda v: rotate(self.arrangement.matrices(v)).flatten(-3))

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.mv(torch.eye(self.p, dtype=torch.float64, device=self.factors.device))


@dataclass(frozen=True, eq=False)
class EigenCurvature(Curvature):
    """EKFAC (George et al., 2018): H = U diag(s) Uᵀ with U = U_B ⊗ U_A and s = diag UᵀHU, the curvature along U."""

    name: str
    arrangement: Arrangement
    basis: Basis
    s: Float[Tensor, "q o i"]
    sums_over_ranks = True

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.s.numel()

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        W = self.basis.rotate(self.arrangement.matrices(v))
        return self.arrangement.flat(self.basis.back(self.s * W), self.p)

    def diagonal(self) -> Float[Tensor, " p"]:
        return self.arrangement.flat(self.basis.squared_diagonal(self.s), self.p)

    def spectrum(self) -> Float[Tensor, " p"]:
        return self.s.flatten()

    def scaled(self, c: Scalar) -> EigenCurvature:
        return replace(self, s=c * self.s)

    def mixed(self, others: Sequence[EigenCurvature], scales: Float[Tensor, " g"]) -> EigenCurvature:
        if not all(H.basis.same(self.basis) for H in others):
            raise StructureError(
                f"Block '{self.name}': two EKFAC curvatures have eigenbases of their own and do not add up exactly. "
                'Fit once on all the data, or use structure="kron".'
            )
        parts = torch.stack([H.s for H in (self, *others)])
        return replace(self, s=torch.einsum("g,gqoi->qoi", scales, parts))

    def addends(self) -> tuple[Tensor, ...]:
        return (self.s,)

    def with_sums(self, sums: Iterator[Tensor]) -> EigenCurvature:
        """Sum of s. The eigenbasis was computed from the factors of all ranks, so it is the same on each."""
        return replace(self, s=next(sums))

    def plus(self, P0: GroupedDiagonal) -> RotatedPrecision:
        delta = one_precision(P0, self.name)
        return RotatedPrecision(self.arrangement, self.basis, lambda: self.s + delta)

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates | None:
        if not P0.isotropic:
            return None
        rotate = self.basis.rotate
        return Coordinates(self.spectrum(), P0.index, lambda v: rotate(self.arrangement.matrices(v)).flatten(-3))

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.mv(torch.eye(self.p, dtype=torch.float64, device=self.s.device))


def _weighted_sum(terms: Iterable[tuple[Scalar, Float[Tensor, "q d d"]]]) -> Float[Tensor, "q d d"]:
    """Σ c M. The scales have no axes, so the result keeps the dtype of the matrices."""
    return reduce(torch.add, (c * M for c, M in terms))
