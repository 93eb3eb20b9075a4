"""Kronecker-factored curvature (KFAC) of a layer: H = B ⊗ A for row-major W (out, in), for q parallel maps.

A is the mean of a aᵀ over data and positions (a: layer inputs), B the sum of g Λ gᵀ (g: output gradients). In the
eigenbasis U_B ⊗ U_A the precision is diagonal: every method is a rotation and an elementwise operation, and a new prior
needs no new eigendecomposition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import NumericalError, StructureError
from lapwing.linalg import joined, products_on_grid
from lapwing.operators.arrangement import Arrangement
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.conditioning import require_semidefinite
from lapwing.operators.coordinates import Coordinates
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.kronecker_factors import Basis, Damping, KroneckerFactors

MOST_KEPT = 1 << 20  # inverse eigenvalues of a layer that are cached; more are recomputed for every piece of the data
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
    additive = True

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
        if a.shape[1] * b.shape[1] < _MANY_PRODUCTS:
            return super().weighted_spectrum()
        values, weights = zip(*(products_on_grid(*maps) for maps in zip(a, b, strict=True)), strict=True)
        return self.scale * torch.cat(values), torch.cat(weights)

    def trace(self) -> Scalar:
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
        kept = self.factors.eigen_A.dtype, self.factors.eigen_B.dtype
        factors = KroneckerFactors(A_sum.to(kept[0]), max(float(count), 1.0), B_sum.to(kept[1]))
        return replace(self, factors=factors, scale=torch.ones_like(self.scale))

    def plus(self, P0: GroupedDiagonal) -> RotatedPrecision:
        a, b, delta = self.factors.a, self.scale * self.factors.b, one_precision(P0, self.name)
        return RotatedPrecision(self.arrangement, self.factors.basis, lambda: self.damping.eigenvalues(a, b, delta))

    def unfactorised(self, P0: GroupedDiagonal) -> RotatedPrecision:
        layer, factors = self.arrangement, self.factors
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
    additive = True

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


@dataclass(frozen=True, eq=False)
class RotatedPrecision(Precision):
    """P = U diag(E) Uᵀ with U = U_B ⊗ U_A: diagonal in the Kronecker eigenbasis."""

    arrangement: Arrangement
    basis: Basis
    # A function: predictions need only the inverse eigenvalues, so E itself is not kept in memory.
    eigenvalues: Callable[[], Float[Tensor, "q o i"]]

    @property
    def E(self) -> Float[Tensor, "q o i"]:
        return self.eigenvalues()

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.arrangement.q * self.arrangement.o * self.arrangement.i

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._through(v, self.E)

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._through(v, 1 / self.E)

    def approximate_solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        U_B, U_A = self.basis.at(torch.float32)
        W = U_B.mT @ self.arrangement.matrices(v.float()) @ U_A
        W = U_B @ (W * self._single_inverse.reshape(W.shape[-3:])) @ U_A.mT
        return self.arrangement.flat(W, self.p).to(v.dtype)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        W = self.arrangement.matrices(eps) * self.E.rsqrt()
        return self.arrangement.flat(self.basis.back(W), self.p)

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        return joined(rows.quad(inverse) for rows, inverse in self._rotated(J))

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        return joined(rows.quad_diagonal(inverse) for rows, inverse in self._rotated(J))

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        rotated = J.rotated(self.basis)
        every = torch.arange(self.p, device=J.device)
        return rotated.cross(rotated, GroupedDiagonal(self._inverse, every))

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return self.arrangement.flat(self.basis.squared_diagonal(1 / self.E), self.p)

    def logdet(self) -> Scalar:
        return self.E.log().sum()

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.mv(torch.eye(self.p, dtype=torch.float64, device=self.basis.U_A.device))

    def _rotated(self, J: Rows) -> Iterator[tuple[Rows, Float[Tensor, " p"]]]:
        """Pieces of the rows in the eigenbasis, each with the inverse eigenvalues in its dtype."""
        inverses: dict[torch.dtype, Tensor] = {}
        for some in J.pieces():
            rows = some.rotated(self.basis)
            if rows.dtype not in inverses:
                inverses[rows.dtype] = self._inverse_for(rows.dtype)
            yield rows, inverses[rows.dtype]

    def _inverse_for(self, dtype: torch.dtype) -> Float[Tensor, " p"]:
        return self._single_inverse if dtype == torch.float32 else self._inverse

    @property
    def _inverse(self) -> Float[Tensor, " p"]:
        return (1 / self.E).flatten() if self.p > MOST_KEPT else self._kept_inverse

    @property
    def _single_inverse(self) -> Float[Tensor, " p"]:
        return self._as_single() if self.p > MOST_KEPT else self._kept_single_inverse

    @cached_property
    def _kept_inverse(self) -> Float[Tensor, " p"]:
        return (1 / self.E).flatten()

    @cached_property
    def _kept_single_inverse(self) -> Float[Tensor, " p"]:
        return self._as_single()

    def _as_single(self) -> Float[Tensor, " p"]:
        return self.E.reciprocal_().flatten().float()  # in place: `E` is a new tensor on every access

    def _through(self, v: Tensor, E: Tensor) -> Tensor:
        W = self.basis.rotate(self.arrangement.matrices(v))
        return self.arrangement.flat(self.basis.back(E * W), self.p)


def one_precision(P0: GroupedDiagonal, name: str) -> Scalar:
    """The prior precision δ of a block, or a StructureError if it is not constant.

    B ⊗ A + δ I is diagonal in the Kronecker eigenbasis; B ⊗ A plus any other diagonal is not.
    """
    if not P0.isotropic:
        sizes = ", ".join(str(int(size)) for size in P0.sizes[:4])
        raise StructureError(
            f"Kronecker block '{name}' needs one prior precision, but the prior has {P0.n_groups} groups in it "
            f"({sizes} entries). A Kronecker product plus an uneven diagonal has no cheap exact inverse. Use "
            'groups="layer" (or Kron(bias="separate") with groups="tensor"), or structure "diag" or "full".'
        )
    return P0.values[0]


def _weighted_sum(terms: Iterable[tuple[Scalar, Float[Tensor, "q d d"]]]) -> Float[Tensor, "q d d"]:
    """Σ c M. The scales have no axes, so the result keeps the dtype of the matrices."""
    return reduce(torch.add, (c * M for c, M in terms))
