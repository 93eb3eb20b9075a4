"""Kronecker factors A and B of a layer's curvature B ⊗ A, their joint eigenbasis, and damping by the prior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing._types import Float, Tensor
from lapwing.operators import axes
from lapwing.operators.eigen import Eigen, Factor


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of A and B: in the basis U_B ⊗ U_A the layer's curvature is diagonal. Large ones are float32.

    Where only leading eigenvectors are kept, coordinates are those of `axes`, w numbers instead of i or o.
    """

    U_A: Float[Tensor, "q i r"]
    U_B: Float[Tensor, "q o s"]

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor]:
        # Cached, unlike conversions to other dtypes: float32 networks rotate every batch of rows.
        return self.U_B.float(), self.U_A.float()

    @property
    def whole(self) -> bool:
        """Whether all eigenvectors of both factors are kept, so that the basis is orthogonal."""
        return axes.whole(self.U_A) and axes.whole(self.U_B)

    @property
    def multiplicities(self) -> Float[Tensor, "j k"]:
        """How often every product of eigenvalues stands."""
        return torch.outer(axes.multiplicities(self.U_B), axes.multiplicities(self.U_A))

    @property
    def shares(self) -> Float[Tensor, "v w"]:
        """The weight of every coordinate in a sum over eigenvalues, such as a trace."""
        return torch.outer(axes.shares(self.U_B), axes.shares(self.U_A))

    def same(self, other: Basis) -> bool:
        return self is other or (torch.equal(self.U_A, other.U_A) and torch.equal(self.U_B, other.U_B))

    def at(self, dtype: torch.dtype) -> tuple[Float[Tensor, "q o s"], Float[Tensor, "q i r"]]:
        """(U_B, U_A) in the dtype of the rows to be rotated."""
        if dtype == torch.float32:
            return self._single
        return self.U_B.to(dtype), self.U_A.to(dtype)

    def rotate(self, W: Float[Tensor, "... q o i"]) -> Float[Tensor, "... q v w"]:
        """U_Bᵀ W U_A."""
        U_B, U_A = self.at(W.dtype)
        left = U_B.mT @ W if axes.whole(U_B) else axes.along(W.mT, U_B).mT
        return axes.along(left, U_A)

    def back(self, W: Float[Tensor, "... q v w"]) -> Float[Tensor, "... q o i"]:
        """U_B W U_Aᵀ, the inverse of `rotate`."""
        U_B, U_A = self.at(W.dtype)
        left = U_B @ W if axes.whole(U_B) else axes.back(W.mT, U_B).mT
        return axes.back(left, U_A)

    def spread(self, E: Float[Tensor, "q j k"]) -> Float[Tensor, "q v w"]:
        """Eigenvalues as one for every coordinate."""
        return axes.spread(axes.spread(E, self.U_A).mT, self.U_B).mT if not self.whole else E

    def squared_diagonal(self, E: Float[Tensor, "q j k"]) -> Float[Tensor, "q o i"]:
        """The diagonal of U diag(E) Uᵀ, U = U_B ⊗ U_A: Σ_pj U_B[o, p]² E[p, j] U_A[i, j]²."""
        U_B, U_A = self.at(E.dtype)
        return axes.squares(U_B) @ E @ axes.squares(U_A).mT


class KroneckerFactors:
    """Sums over data: Σ a aᵀ with its count of positions, and Σ g Λ gᵀ. Sums are additive; A is divided by its count
    only when used."""

    def __init__(
        self, A_sum: Float[Tensor, "q i i"] | Factor, count: float, B_sum: Float[Tensor, "q o o"] | Factor
    ) -> None:
        self.count = count
        self.eigen_A = A_sum if isinstance(A_sum, Factor) else Eigen(A_sum, count)
        self.eigen_B = B_sum if isinstance(B_sum, Factor) else Eigen(B_sum)

    @property
    def a(self) -> Float[Tensor, "q k"]:
        """Eigenvalues of A."""
        return self.eigen_A.pair[0]

    @property
    def b(self) -> Float[Tensor, "q j"]:
        """Eigenvalues of B."""
        return self.eigen_B.pair[0]

    @cached_property
    def basis(self) -> Basis:
        return Basis(self.eigen_A.pair[1], self.eigen_B.pair[1])

    @property
    def device(self) -> torch.device:
        return self.eigen_A.held.device

    def same_inputs(self, other: KroneckerFactors) -> bool:
        """Whether both have the same A: parts of one likelihood from the same pass over the data."""
        if self.eigen_A is other.eigen_A:
            return True
        return self.count == other.count and self.eigen_A.same(other.eigen_A)


class Damping(ABC):
    """How the prior precision δ is added to the eigenvalues of B ⊗ A."""

    adds: bool  # whether P = H + δ I exactly

    @abstractmethod
    def eigenvalues(self, a: Tensor, b: Tensor, delta: Tensor) -> Float[Tensor, "q o i"]: ...


@dataclass(frozen=True)
class ExactDamping(Damping):
    """Exact: eigenvalues b_o a_i + δ."""

    adds = True

    def eigenvalues(self, a: Tensor, b: Tensor, delta: Tensor) -> Float[Tensor, "q o i"]:
        return torch.addcmul(delta, b[:, :, None], a[:, None, :])  # one kernel, no intermediate tensor of P entries


@dataclass(frozen=True)
class SplitDamping(Damping):
    """Split between the factors: eigenvalues (b_o + √δ)(a_i + √δ) (Ritter et al., 2018).

    Overestimates the precision: the extra term is √δ (a_i + b_o) ≥ 0.
    """

    adds = False

    def eigenvalues(self, a: Tensor, b: Tensor, delta: Tensor) -> Float[Tensor, "q o i"]:
        return (b[:, :, None] + delta.sqrt()) * (a[:, None, :] + delta.sqrt())
