"""Kronecker factors A and B of a layer's curvature B ⊗ A, their eigendecompositions, and damping by the prior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing._types import Float, Tensor


@dataclass(frozen=True, eq=False)
class Basis:
    """Eigenvectors of A and B: in the basis U_B ⊗ U_A the layer's curvature is diagonal. Large ones are float32."""

    U_A: Float[Tensor, "q i i"]
    U_B: Float[Tensor, "q o o"]

    @cached_property
    def _single(self) -> tuple[Tensor, Tensor]:
        # Cached, unlike conversions to other dtypes: float32 networks rotate every batch of rows.
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
        """U_B W U_Aᵀ, the inverse of `rotate`."""
        U_B, U_A = self.at(W.dtype)
        return U_B @ W @ U_A.mT

    def squared_diagonal(self, E: Float[Tensor, "q o i"]) -> Float[Tensor, "q o i"]:
        """The diagonal of U diag(E) Uᵀ, U = U_B ⊗ U_A: Σ_pj U_B[o, p]² E[p, j] U_A[i, j]²."""
        U_B, U_A = self.at(E.dtype)
        return U_B**2 @ E @ (U_A**2).mT


class Eigen:
    """A positive semi-definite mean, sum / count, with a lazy eigendecomposition.

    A float32 sum is a large one. It is released once decomposed, to save memory, and rebuilt as U diag(λ) Uᵀ on access.
    The decomposition is computed in float64, one map at a time; eigenvalues stay float64.
    """

    def __init__(self, total: Float[Tensor, "q d d"], count: float = 1.0) -> None:
        self.count = count
        self._total: Tensor | None = total
        self._pair: tuple[Tensor, Tensor] | None = None

    @classmethod
    def decomposed(cls, values: Float[Tensor, "q d"], U: Float[Tensor, "q d d"], count: float) -> Eigen:
        """From eigenvalues of the mean and eigenvectors, without the sum."""
        made = cls(U, count)
        made._total, made._pair = None, (values, U)
        return made

    @property
    def total(self) -> Float[Tensor, "q d d"]:
        """The sum. If it was released it is rebuilt, and not kept."""
        if self._total is not None:
            return self._total
        values, U = self.pair
        return (U * (values * self.count).to(U.dtype)[:, None, :]) @ U.mT

    @property
    def pair(self) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q d d"]]:
        """Eigenvalues of the mean, ascending, and eigenvectors."""
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
                del vectors  # else two float64 copies would exist while the next map is decomposed
        values = values / self.count
        # Set eigenvalues within rounding error to zero. Otherwise, for a rank-deficient factor and a weak prior, the
        # rounding error would dominate the prior precision.
        rounding = _rounding(total) * values.amax(-1, keepdim=True)
        return torch.where(values > rounding, values, 0.0), U

    @property
    def known(self) -> bool:
        return self._pair is not None

    @property
    def sum_released(self) -> bool:
        """Whether the sum was released after the decomposition."""
        return self._total is None

    @property
    def held(self) -> Float[Tensor, "q d d"]:
        """The matrix in memory: the sum, or the eigenvectors if it was released."""
        return self.pair[1] if self._total is None else self._total

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def know(self, values: Float[Tensor, "q d"], U: Float[Tensor, "q d d"]) -> None:
        """Set the eigendecomposition, computed by another rank."""
        total = self._total
        if total is not None and total.dtype != torch.float64:
            self._total, U = None, U.to(total.dtype)  # release the sum: U and λ determine it
        # One assignment of a complete tuple: another thread sees the old pair or the new one, never a mixture.
        self._pair = values, U

    def diagonal(self) -> Float[Tensor, "q d"]:
        """The diagonal of the sum in float64, without rebuilding the sum."""
        if self._total is not None:
            return self._total.diagonal(dim1=-2, dim2=-1).double()
        values, U = self.pair
        # diag U diag(λ) Uᵀ = (U ∘ U) λ, one map at a time to bound the memory of the float64 copies
        return self.count * torch.stack([(u.double() ** 2) @ v for u, v in zip(U, values, strict=True)])


def _rounding(total: Float[Tensor, "q d d"]) -> float:
    """Threshold relative to λ_max below which eigenvalues are rounding error: d ε in float64, the solver's error bound.

    A float32 sum is decomposed in float64, so only its entries are rounded. Those errors are independent and add up to
    far less than d ε, so the threshold is ε: d ε (1e-4) would remove eigenvalues that the data determine.
    """
    eps = torch.finfo(total.dtype).eps
    return total.shape[-1] * eps if total.dtype == torch.float64 else eps


class KroneckerFactors:
    """Sums over data: Σ a aᵀ with its count of positions, and Σ g Λ gᵀ. Sums are additive; A is divided by its count
    only when used."""

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
        """Eigenvalues of A."""
        return self.eigen_A.pair[0]

    @property
    def b(self) -> Float[Tensor, "q o"]:
        """Eigenvalues of B."""
        return self.eigen_B.pair[0]

    @cached_property
    def basis(self) -> Basis:
        return Basis(self.eigen_A.pair[1], self.eigen_B.pair[1])

    @property
    def device(self) -> torch.device:
        return self.eigen_A.held.device

    @property
    def single(self) -> bool:
        """Whether a factor is stored in float32."""
        return torch.float32 in (self.eigen_A.dtype, self.eigen_B.dtype)

    def same_inputs(self, other: KroneckerFactors) -> bool:
        """Whether both have the same A: parts of one likelihood from the same pass over the data."""
        if self.eigen_A is other.eigen_A:
            return True
        return self.count == other.count and torch.equal(self.A_sum, other.A_sum)


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
