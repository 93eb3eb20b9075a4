"""The precision of a layer in its Kronecker eigenbasis, for KFAC and EKFAC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import StructureError
from lapwing.linalg import joined, recomputed
from lapwing.operators.arrangement import Arrangement
from lapwing.operators.base import Precision, Rows
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.kronecker_factors import Basis

MOST_KEPT = 1 << 20  # inverse eigenvalues of a layer that are cached; more are recomputed for every piece of the data


@dataclass(frozen=True, eq=False)
class RotatedPrecision(Precision):
    """P = U diag(E) Uᵀ with U = U_B ⊗ U_A: diagonal in the Kronecker eigenbasis."""

    arrangement: Arrangement
    basis: Basis
    # A function: predictions need only the inverse eigenvalues, so E itself is not kept in memory.
    eigenvalues: Callable[[], Float[Tensor, "q j k"]]

    @property
    def E(self) -> Float[Tensor, "q j k"]:
        return self.eigenvalues()

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.arrangement.q * self.arrangement.o * self.arrangement.i

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._through(v, self.E)

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self._through(v, 1 / self.E)

    def approximate_solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        # float32 halves the time of the rotations; a preconditioner does not need more digits.
        W = self.basis.rotate(self.arrangement.matrices(v.float()))
        W = self.basis.back(W * self._single_inverse.reshape(W.shape[-3:]))
        return self.arrangement.flat(W, self.p).to(v.dtype)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        W = self.arrangement.matrices(eps)
        if not self.basis.whole:  # more coordinates than there are numbers in ε: the symmetric root
            W = self.basis.rotate(W)
        W = W * self.basis.spread(self.E.rsqrt())
        return self.arrangement.flat(self.basis.back(W), self.p)

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        return joined(self._each(J, lambda rows, inverse: rows.quad(inverse)))

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        return joined(self._each(J, lambda rows, inverse: rows.quad_diagonal(inverse)))

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        rotated = J.rotated(self.basis)
        every = torch.arange(rotated.p, device=J.device)  # one group per eigenvalue: an arbitrary diagonal
        return rotated.cross(rotated, GroupedDiagonal(self._inverse, every))

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return self.arrangement.flat(self.basis.squared_diagonal(1 / self.E), self.p)

    def logdet(self) -> Scalar:
        logs = self.E.log()
        return logs.sum() if self.basis.whole else (logs * self.basis.multiplicities).sum()

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.mv(torch.eye(self.p, dtype=torch.float64, device=self.basis.U_A.device))

    def _each(self, J: Rows, contract: Callable[[Rows, Tensor], Tensor]) -> Iterator[Tensor]:
        """Contractions of pieces of the rows in the eigenbasis, with the inverse eigenvalues in their dtype."""
        inverses: dict[torch.dtype, Tensor] = {}

        def contracted(some: Rows) -> Tensor:
            rows = some.fresh().rotated(self.basis)
            if rows.dtype not in inverses:
                inverses[rows.dtype] = self._inverse_for(rows.dtype)
            return contract(rows, inverses[rows.dtype])

        return (
            recomputed(partial(contracted, some), attached=J.attached, floats=J.n * J.c * self.p) for some in J.pieces()
        )

    def _inverse_for(self, dtype: torch.dtype) -> Float[Tensor, " k"]:
        return self._single_inverse if dtype == torch.float32 else self._inverse

    @property
    def _inverse(self) -> Float[Tensor, " k"]:
        return self._as_double() if self.p > MOST_KEPT else self._kept_inverse

    @property
    def _single_inverse(self) -> Float[Tensor, " k"]:
        return self._as_single() if self.p > MOST_KEPT else self._kept_single_inverse

    @cached_property
    def _kept_inverse(self) -> Float[Tensor, " k"]:
        return self._as_double()

    @cached_property
    def _kept_single_inverse(self) -> Float[Tensor, " k"]:
        return self._as_single()

    def _as_double(self) -> Float[Tensor, " k"]:
        return self.basis.spread(1 / self.E).flatten()

    def _as_single(self) -> Float[Tensor, " k"]:
        return self.basis.spread(self.E.reciprocal_().float()).flatten()  # in place: `E` is new on every access

    def _through(self, v: Tensor, E: Tensor) -> Tensor:
        W = self.basis.rotate(self.arrangement.matrices(v))
        return self.arrangement.flat(self.basis.back(self.basis.spread(E) * W), self.p)


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
