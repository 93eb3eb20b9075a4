"""The factors of a layer's curvature B ⊗ A, their eigenvectors, and how a prior enters the eigenvalues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing._types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of A and B, in which the layer's curvature is diagonal."""

    U_A: Float[Tensor, "q i i"]
    U_B: Float[Tensor, "q o o"]

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor]:
        return self.U_B.float(), self.U_A.float()

    def same(self, other: Basis) -> bool:
        return self is other or (torch.equal(self.U_A, other.U_A) and torch.equal(self.U_B, other.U_B))

    def at(self, dtype: torch.dtype) -> tuple[Float[Tensor, "q o o"], Float[Tensor, "q i i"]]:
        """(U_B, U_A) in the dtype of the rows to be rotated."""
        if dtype == torch.float32:
            return self._single
        return self.U_B.to(dtype), self.U_A.to(dtype)

    def rotate(self, W: Float[Tensor, "... q o i"]) -> Float[Tensor, "... q o i"]:
        """U_Bᵀ W U_A."""
        return self.U_B.mT @ W @ self.U_A

    def back(self, W: Float[Tensor, "... q o i"]) -> Float[Tensor, "... q o i"]:
        """U_B W U_Aᵀ."""
        return self.U_B @ W @ self.U_A.mT


@dataclass(frozen=True, eq=False)
class Eigen:
    """The eigenvalues and eigenvectors of a positive semidefinite mean, found when first asked for."""

    total: Float[Tensor, "q d d"]
    count: float = 1.0  # the matrix is total / count, and not kept

    @cached_property
    def pair(self) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q d d"]]:
        values, U = torch.linalg.eigh(self.total)
        values = values / self.count
        # Eigenvalues within rounding of zero are zero: a rank-deficient factor must not outweigh a weak prior.
        rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True)
        return torch.where(values > rounding, values, 0.0), U

    @property
    def known(self) -> bool:
        return "pair" in self.__dict__

    def know(self, values: Float[Tensor, "q d"], U: Float[Tensor, "q d d"]) -> None:
        """Spare the decomposition: another process has found it."""
        self.__dict__["pair"] = values, U


@dataclass(frozen=True, eq=False)
class KroneckerFactors:
    """Sums over the data: Σ a aᵀ with the number of positions in it, and Σ g gᵀ. They add; the mean is taken once."""

    A_sum: Float[Tensor, "q i i"]
    count: float
    B_sum: Float[Tensor, "q o o"]
    shared: Eigen | None = None  # of A, when it is known from elsewhere

    @property
    def A(self) -> Float[Tensor, "q i i"]:
        return self.A_sum / self.count

    @cached_property
    def eigen_A(self) -> Eigen:
        return Eigen(self.A_sum, self.count) if self.shared is None else self.shared

    @cached_property
    def eigen_B(self) -> Eigen:
        return Eigen(self.B_sum)

    @property
    def a(self) -> Float[Tensor, "q i"]:
        return self.eigen_A.pair[0]

    @property
    def b(self) -> Float[Tensor, "q o"]:
        return self.eigen_B.pair[0]

    @cached_property
    def basis(self) -> Basis:
        return Basis(self.eigen_A.pair[1], self.eigen_B.pair[1])

    def same_inputs(self, other: KroneckerFactors) -> bool:
        """Whether both are of the same data."""
        return self.count == other.count and torch.equal(self.A_sum, other.A_sum)


class Damping(ABC):
    """How the prior δ enters the eigenvalues of B ⊗ A."""

    adds: bool  # whether P = H + δ I exactly

    @abstractmethod
    def eigenvalues(self, a: Tensor, b: Tensor, delta: Tensor) -> Float[Tensor, "q o i"]: ...


@dataclass(frozen=True)
class ExactDamping(Damping):
    """b_o a_i + δ: the prior itself."""

    adds = True

    def eigenvalues(self, a: Tensor, b: Tensor, delta: Tensor) -> Float[Tensor, "q o i"]:
        return torch.addcmul(delta, b[:, :, None], a[:, None, :])


@dataclass(frozen=True)
class SplitDamping(Damping):
    """(b_o + √δ)(a_i + √δ): each factor gets its share (Ritter et al., 2018); always more concentrated."""

    adds = False

    def eigenvalues(self, a: Tensor, b: Tensor, delta: Tensor) -> Float[Tensor, "q o i"]:
        return (b[:, :, None] + delta.sqrt()) * (a[:, None, :] + delta.sqrt())
