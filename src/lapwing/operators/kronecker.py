"""Kronecker-factored curvature (KFAC) of a layer: H = B ⊗ A for row-major W (out, in), for q parallel maps.

A is the mean of a aᵀ over data and positions (a: layer inputs), B the sum of g Λ gᵀ (g: output gradients). In the
eigenbasis U_B ⊗ U_A the precision is diagonal: every method is a rotation and an elementwise operation, and a new prior
needs no new eigendecomposition. So it is where only leading directions of a large factor are kept (`eigen`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import NumericalError, StructureError
from lapwing.linalg import products_on_grid
from lapwing.operators.arrangement import Arrangement
from lapwing.operators.base import Curvature
from lapwing.operators.conditioning import require_semidefinite
from lapwing.operators.coordinates import Coordinates
from lapwing.operators.eigen import Eigen, Factor, combined
from lapwing.operators.grouped_diagonal import GroupedDiagonal, one_group
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
        BW = self.factors.eigen_B.through(W.mT).mT
        return self.arrangement.flat(self.scale * self.factors.eigen_A.through(BW), self.p)

    def diagonal(self) -> Float[Tensor, " p"]:
        b, a = self.factors.eigen_B.diagonal(), self.factors.eigen_A.diagonal() / self.factors.count
        return self.arrangement.flat(self.scale * b[:, :, None] * a[:, None, :], self.p)

    def spectrum(self) -> Float[Tensor, " p"]:
        products = self.scale * (self.factors.b[:, :, None] * self.factors.a[:, None, :])
        if self.factors.basis.whole:
            return products.flatten()
        return products.flatten(1).repeat_interleave(self.factors.basis.multiplicities.long().flatten(), 1).flatten()

    def weighted_spectrum(self) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        a, b = self.factors.a, self.factors.b
        if not self.factors.basis.whole:
            counts = self.factors.basis.multiplicities.expand(len(a), -1, -1)
            return self.scale * (b[:, :, None] * a[:, None, :]).flatten(), counts.flatten()
        if a.shape[1] * b.shape[1] < _MANY_PRODUCTS:  # for few products the exact sum is faster than the grid
            return super().weighted_spectrum()
        values, weights = zip(*(products_on_grid(*maps) for maps in zip(a, b, strict=True)), strict=True)
        return self.scale * torch.cat(values), torch.cat(weights)

    def trace(self) -> Scalar:
        # tr(B ⊗ A) = tr B · tr A per map, without eigendecompositions
        return self.scale * (self.factors.eigen_B.trace() * self.factors.eigen_A.trace()).sum() / self.factors.count

    def scaled(self, c: Scalar) -> KroneckerCurvature:
        return replace(self, scale=c * self.scale)

    def mixed(self, others: Sequence[KroneckerCurvature], scales: Float[Tensor, " g"]) -> KroneckerCurvature:
        # Parts of one pass share A: only B adds up. Curvatures of other data add to the sum and the count of A too.
        parts = (self, *others)
        B = _outputs(parts, [c * H.scale for c, H in zip(scales, parts, strict=True)])
        if all(H.factors.same_inputs(self.factors) for H in others):
            factors = KroneckerFactors(self.factors.eigen_A, self.factors.count, B)
        else:
            factors = _pooled(parts, B)
        return replace(self, factors=factors, scale=torch.ones_like(self.scale))

    def joined(self, others: Sequence[KroneckerCurvature]) -> KroneckerCurvature:
        """Unlike `mixed`, treats the others as different data even if their A happens to be equal."""
        parts = (self, *others)
        factors = _pooled(parts, _outputs(parts, [H.scale for H in parts]))
        return replace(self, factors=factors, scale=torch.ones_like(self.scale))

    def without(self, other: KroneckerCurvature) -> KroneckerCurvature:
        count = self.factors.count - other.factors.count
        if count <= 0:
            raise NumericalError(f"Block '{self.name}': nothing would be left of its data.")
        A_sum = _whole(self.name, self.factors.eigen_A) - _whole(self.name, other.factors.eigen_A)
        B_sum = self.scale * _whole(self.name, self.factors.eigen_B)
        B_sum = B_sum - other.scale * _whole(self.name, other.factors.eigen_B)
        # B ⊗ A of the difference is positive semi-definite if both factors are, so check them separately.
        for left, whole in ((A_sum, self.factors.a * self.factors.count), (B_sum, self.scale * self.factors.b)):
            require_semidefinite(torch.linalg.eigvalsh(left.double()), whole, _DOWNDATED[left.dtype])
        return replace(self, factors=KroneckerFactors(A_sum, count, B_sum), scale=torch.ones_like(self.scale))

    def addends(self) -> tuple[Tensor, ...]:
        """The count, Σ a aᵀ, and c Σ g Λ gᵀ."""
        # A layer that this rank's data did not pass through has a default count of 1, which must not be added.
        seen = self.factors.count > 1 or bool(self.factors.eigen_A.trace().any())
        count = torch.tensor(self.factors.count * seen, dtype=torch.float64)
        return count, *self.factors.eigen_A.sums(), *(self.scale * part for part in self.factors.eigen_B.sums())

    def with_sums(self, sums: Iterator[Tensor]) -> KroneckerCurvature:
        count = max(float(next(sums)), 1.0)
        A = self.factors.eigen_A.with_sums(sums, count)
        factors = KroneckerFactors(A, count, self.factors.eigen_B.with_sums(sums, 1.0))
        return replace(self, factors=factors, scale=torch.ones_like(self.scale))

    def plus(self, P0: GroupedDiagonal) -> RotatedPrecision:
        a, b, delta = self.factors.a, self.scale * self.factors.b, one_precision(P0, self.name)
        return RotatedPrecision(self.arrangement, self.factors.basis, lambda: self.damping.eigenvalues(a, b, delta))

    def unfactorised(self, P0: GroupedDiagonal) -> RotatedPrecision:
        # The sums have the shape of their eigenvectors: cloned, they take the memory that those will take.
        basis = Basis(self.factors.eigen_A.held.clone(), self.factors.eigen_B.held.clone())
        shape = self.arrangement.q, *basis.multiplicities.shape
        return RotatedPrecision(self.arrangement, basis, lambda: P0.values.new_ones(shape))

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates | None:
        if not P0.isotropic or not self.exact_prior:
            return None
        basis, a, b = self.factors.basis, self.factors.a, self.factors.b
        eigenvalues = basis.spread(self.scale * b[:, :, None] * a[:, None, :]).flatten()
        return Coordinates(
            eigenvalues,
            one_group(len(eigenvalues)).to(eigenvalues.device),
            lambda v: basis.rotate(self.arrangement.matrices(v)).flatten(-3),
            basis.shares.expand(len(a), -1, -1).flatten(),
        )

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
        rotate, each = self.basis.rotate, torch.ones_like(self.spectrum())
        return Coordinates(self.spectrum(), P0.index, lambda v: rotate(self.arrangement.matrices(v)).flatten(-3), each)

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.mv(torch.eye(self.p, dtype=torch.float64, device=self.s.device))


def _outputs(parts: Sequence[KroneckerCurvature], scales: Sequence[Scalar]) -> Factor:
    """Σ c B. The scales have no axes, so the result keeps the dtype of the matrices."""
    return combined([H.factors.eigen_B for H in parts], scales, 1.0)


def _pooled(parts: Sequence[KroneckerCurvature], B: Factor) -> KroneckerFactors:
    """Factors of all data together, whose inputs are pooled in A."""
    count = sum(H.factors.count for H in parts)
    return KroneckerFactors(combined([H.factors.eigen_A for H in parts], [1.0] * len(parts), count), count, B)


def _whole(name: str, factor: Factor) -> Float[Tensor, "q d d"]:
    if isinstance(factor, Eigen):
        return factor.total
    raise StructureError(
        f"Block '{name}': data cannot be taken out of a factor of which only leading directions are kept. Fit again "
        "without these data, or fit with lw.Kron(large=None), which keeps all factors whole."
    )
