"""The factors of a layer's curvature B ⊗ A, their eigenvectors, and how a prior enters the eigenvalues."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing._types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of A and B, in which the layer's curvature is diagonal. Large ones are kept in float32."""

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
        U_B, U_A = self.at(W.dtype)
        return U_B.mT @ W @ U_A

    def back(self, W: Float[Tensor, "... q o i"]) -> Float[Tensor, "... q o i"]:
        """U_B W U_Aᵀ."""
        U_B, U_A = self.at(W.dtype)
        return U_B @ W @ U_A.mT

    def through_squares(self, E: Float[Tensor, "q o i"]) -> Float[Tensor, "q o i"]:
        """diag of U diag(E) Uᵀ: Σ_pj U_B[o, p]² E[p, j] U_A[i, j]²."""
        U_B, U_A = self.at(E.dtype)
        return U_B**2 @ E @ (U_A**2).mT


class Eigen:
    """A positive semidefinite mean, sum / count, and its eigenvalues and eigenvectors, found when first asked for.

    A sum in float32 is a large one: it is let go once it is decomposed, and rebuilt as U diag(λ) Uᵀ where it is asked
    for. The decomposition itself is done in float64, one map at a time; eigenvalues stay in float64.
    """

    def __init__(self, total: Float[Tensor, "q d d"], count: float = 1.0) -> None:
        self.count = count
        self._total: Tensor | None = total
        self._pair: tuple[Tensor, Tensor] | None = None

    @classmethod
    def decomposed(cls, values: Float[Tensor, "q d"], U: Float[Tensor, "q d d"], count: float) -> Eigen:
        """From the eigenvalues of the mean and its eigenvectors, where the sum was let go."""
        made = cls(U, count)
        made._total, made._pair = None, (values, U)
        return made

    @property
    def total(self) -> Float[Tensor, "q d d"]:
        """The sum; not kept if it has to be rebuilt."""
        if self._total is not None:
            return self._total
        values, U = self.pair
        return (U * (values * self.count).to(U.dtype)[:, None, :]) @ U.mT

    @property
    def pair(self) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q d d"]]:
        if self._pair is None:
            assert self._total is not None
            self.know(*self._decomposition(self._total))
        assert self._pair is not None
        return self._pair

    def _decomposition(self, total: Float[Tensor, "q d d"]) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q d d"]]:
        if total.dtype == torch.float64:
            values, U = torch.linalg.eigh(total)
        else:
            U = torch.empty_like(total, memory_format=torch.contiguous_format)
            values = torch.empty(total.shape[:2], dtype=torch.float64, device=total.device)
            for k, M in enumerate(total):
                values[k], vectors = torch.linalg.eigh(M.double())
                U[k] = vectors
                del vectors
        values = values / self.count
        # Eigenvalues within rounding of zero are zero: a rank-deficient factor must not outweigh a weak prior.
        rounding = _rounding(total) * values.amax(-1, keepdim=True)
        return torch.where(values > rounding, values, 0.0), U

    @property
    def known(self) -> bool:
        return self._pair is not None

    @property
    def rebuilds(self) -> bool:
        """Whether the sum was let go."""
        return self._total is None

    @property
    def held(self) -> Float[Tensor, "q d d"]:
        """What is in memory: the sum, or the eigenvectors where it was let go."""
        return self.pair[1] if self._total is None else self._total

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def know(self, values: Float[Tensor, "q d"], U: Float[Tensor, "q d d"]) -> None:
        """Spare the decomposition: another process has found it."""
        total = self._total
        if total is not None and total.dtype != torch.float64:
            self._total, U = None, U.to(total.dtype)
        self._pair = values, U

    def diagonal(self) -> Float[Tensor, "q d"]:
        """Of the sum, float64; without rebuilding it."""
        if self._total is not None:
            return self._total.diagonal(dim1=-2, dim2=-1).double()
        values, U = self.pair
        return self.count * torch.stack([(u.double() ** 2) @ v for u, v in zip(U, values, strict=True)])


def _rounding(total: Float[Tensor, "q d d"]) -> float:
    """Relative to the largest, which eigenvalues are rounding: d ε in float64, the bound of the solver's error.

    In float32 the entries are rounded, the solver is not. Their errors are independent, so they add up to far less than
    d ε, and a bound of that size (1e-4) would remove eigenvalues that the data determine.
    """
    eps = torch.finfo(total.dtype).eps
    return total.shape[-1] * eps if total.dtype == torch.float64 else eps


class KroneckerFactors:
    """Sums over the data: Σ a aᵀ with the number of positions in it, and Σ g gᵀ. They add; the mean is taken once."""

    def __init__(
        self, A_sum: Float[Tensor, "q i i"] | Eigen, count: float, B_sum: Float[Tensor, "q o o"] | Eigen
    ) -> None:
        self.count = count
        self.eigen_A = A_sum if isinstance(A_sum, Eigen) else Eigen(A_sum, count)
        self.eigen_B = B_sum if isinstance(B_sum, Eigen) else Eigen(B_sum)

    @property
    def A_sum(self) -> Float[Tensor, "q i i"]:
        return self.eigen_A.total

    @property
    def B_sum(self) -> Float[Tensor, "q o o"]:
        return self.eigen_B.total

    @property
    def A(self) -> Float[Tensor, "q i i"]:
        return self.A_sum / self.count

    @property
    def a(self) -> Float[Tensor, "q i"]:
        return self.eigen_A.pair[0]

    @property
    def b(self) -> Float[Tensor, "q o"]:
        return self.eigen_B.pair[0]

    @cached_property
    def basis(self) -> Basis:
        return Basis(self.eigen_A.pair[1], self.eigen_B.pair[1])

    @property
    def device(self) -> torch.device:
        return self.eigen_A.held.device

    @property
    def single(self) -> bool:
        """Whether a factor is kept in float32."""
        return torch.float32 in (self.eigen_A.dtype, self.eigen_B.dtype)

    def same_inputs(self, other: KroneckerFactors) -> bool:
        """Whether both are of the same data."""
        if self.eigen_A is other.eigen_A:
            return True
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
