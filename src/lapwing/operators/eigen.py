"""One Kronecker factor: a sum Σ x xᵀ over data and the eigenvectors of its mean, all of them or the leading ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.linalg import Sketch
from lapwing.operators import axes

_NARROW = 16  # a factor is large next to the layer's other side from this ratio on


@dataclass(frozen=True)
class Leading:
    """Which factors are kept as leading directions and a multiple of the identity, and how many directions.

    Those with a side above `large`, in layers whose other side is at least 16 times shorter: such a factor has many
    more numbers than the layer's weights. At most `rank` directions, or as many as hold `energy` of the trace.
    """

    large: int | None = None
    energy: float = 1.0
    rank: int = 1

    def directions(self, side: int, other: int) -> int | None:
        """Most directions of the factor of a side; None if it is kept whole."""
        if self.large is None or side <= max(self.large, self.rank) or side < _NARROW * other:
            return None
        return self.rank


WHOLE = Leading()  # every factor is kept whole


class Factor(ABC):
    """A positive semi-definite mean, sum / count (q, d, d), with a lazy eigendecomposition."""

    count: float
    _pair: tuple[Tensor, Tensor] | None = None

    @property
    def pair(self) -> tuple[Float[Tensor, "q k"], Float[Tensor, "q d r"]]:
        """Eigenvalues of the mean and eigenvectors, as in `axes`."""
        if self._pair is None:
            self.know(*self._decomposition())
        assert self._pair is not None
        return self._pair

    @property
    def known(self) -> bool:
        return self._pair is not None

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    @abstractmethod
    def _decomposition(self) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def know(self, values: Float[Tensor, "q k"], U: Float[Tensor, "q d r"]) -> None:
        """Set the eigendecomposition, computed here or by another rank."""

    @property
    @abstractmethod
    def held(self) -> Float[Tensor, "q d r"]:
        """The matrix in memory: the sum, or the eigenvectors if it was released."""

    @abstractmethod
    def through(self, W: Float[Tensor, "... q n d"]) -> Float[Tensor, "... q n d"]:
        """W times the mean."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, "q d"]:
        """The diagonal of the sum in float64."""

    @abstractmethod
    def trace(self) -> Float[Tensor, " q"]:
        """The trace of the sum in float64, without a decomposition."""

    @abstractmethod
    def same(self, other: Factor) -> bool: ...

    @abstractmethod
    def sums(self) -> tuple[Tensor, ...]:
        """Tensors that are sums over data, entry by entry."""

    @abstractmethod
    def with_sums(self, sums: Iterator[Tensor], count: float) -> Factor:
        """The inverse of `sums`."""

    @property
    @abstractmethod
    def packed_shape(self) -> torch.Size:
        """Shape of `packed`, known before the decomposition."""

    def packed(self) -> Float[Tensor, "q k r"]:
        """Eigenvalues as the first rows, eigenvectors below: one matrix to send to other ranks."""
        values, U = self.pair
        both = U.new_zeros(self.packed_shape, dtype=torch.float64)
        both[:, : -U.shape[1], : U.shape[2]].copy_(_in_rows(values, U))
        both[:, -U.shape[1] :, : U.shape[2]] = U
        return both

    @abstractmethod
    def know_packed(self, both: Float[Tensor, "q k r"]) -> None:
        """Set the eigendecomposition that another rank has packed."""


class Eigen(Factor):
    """A factor kept whole.

    A float32 sum is a large one. It is released once decomposed, to save memory, and rebuilt as U diag(λ) Uᵀ on access.
    The decomposition is computed in float64, one map at a time; eigenvalues stay float64.
    """

    def __init__(self, total: Float[Tensor, "q d d"], count: float = 1.0) -> None:
        self.count = count
        self._total: Tensor | None = total

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

    def _decomposition(self) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q d d"]]:
        total = self._total
        assert total is not None
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
    def sum_released(self) -> bool:
        """Whether the sum was released after the decomposition."""
        return self._total is None

    @property
    def held(self) -> Float[Tensor, "q d d"]:
        return self.pair[1] if self._total is None else self._total

    def know(self, values: Float[Tensor, "q d"], U: Float[Tensor, "q d d"]) -> None:
        total = self._total
        if total is not None and total.dtype != torch.float64:
            self._total, U = None, U.to(total.dtype)  # release the sum: U and λ determine it
        # One assignment of a complete tuple: another thread sees the old pair or the new one, never a mixture.
        self._pair = values, U

    def through(self, W: Float[Tensor, "... q n d"]) -> Float[Tensor, "... q n d"]:
        return W @ (self.total / self.count).to(W.dtype)

    def diagonal(self) -> Float[Tensor, "q d"]:
        # Without rebuilding the sum.
        if self._total is not None:
            return self._total.diagonal(dim1=-2, dim2=-1).double()
        values, U = self.pair
        # diag U diag(λ) Uᵀ = (U ∘ U) λ, one map at a time to bound the memory of the float64 copies
        return self.count * torch.stack([(u.double() ** 2) @ v for u, v in zip(U, values, strict=True)])

    def trace(self) -> Float[Tensor, " q"]:
        return self.diagonal().sum(-1)

    def same(self, other: Factor) -> bool:
        return isinstance(other, Eigen) and torch.equal(self.total, other.total)

    def sums(self) -> tuple[Tensor, ...]:
        return (self.total,)

    def with_sums(self, sums: Iterator[Tensor], count: float) -> Eigen:
        return Eigen(next(sums).to(self.dtype), count)  # sums over ranks are computed in float64

    @property
    def packed_shape(self) -> torch.Size:
        q, d, _ = self.held.shape
        return torch.Size((q, d + 1, d))

    def know_packed(self, both: Float[Tensor, "q k d"]) -> None:
        self.know(both[:, 0], both[:, 1:])


class LeadingEigen(Factor):
    """A factor of which leading directions U are kept: U diag(s) Uᵀ + ρ (I − U Uᵀ), with the exact trace.

    The sum is a sketch, so that the factor is never formed: sketches of other data add up exactly. Once decomposed the
    sketch is released, and rebuilt from the directions kept if more data come.
    """

    def __init__(self, total: Sketch, leading: Leading, count: float = 1.0) -> None:
        self.count, self.leading = count, leading
        self._total: Sketch | None = total

    @classmethod
    def decomposed(
        cls, values: Float[Tensor, "q k"], U: Float[Tensor, "q d r"], leading: Leading, count: float
    ) -> LeadingEigen:
        """From eigenvalues (s, ρ) of the mean and eigenvectors, without the sketch."""
        made = cls(Sketch(U, values.sum(-1)), leading, count)
        made._total, made._pair = None, (values, U)
        return made

    @property
    def total(self) -> Sketch:
        total = self._total
        if total is not None:
            return total
        values, U = self.pair
        return Sketch.of_pairs(values * self.count, U, self.leading.rank)

    def _decomposition(self) -> tuple[Float[Tensor, "q k"], Float[Tensor, "q d r"]]:
        values, U = self.total.leading(self.leading.energy)
        return values / self.count, U

    def know(self, values: Float[Tensor, "q k"], U: Float[Tensor, "q d r"]) -> None:
        U = U.to(self.dtype)
        self._pair = values, U
        self._total = None  # after the pair is there, for other threads

    @property
    def held(self) -> Float[Tensor, "q d r"]:
        total = self._total
        return self.pair[1] if total is None else total.Y

    @property
    def kept(self) -> tuple[int, Float[Tensor, " q"]]:
        """How many directions are kept, and their share of the trace."""
        values, U = self.pair
        s, rest = values[:, :-1].sum(-1), (U.shape[1] - U.shape[2]) * values[:, -1]
        return U.shape[2], torch.where(rest > 0, s / (s + rest), 1.0)

    def through(self, W: Float[Tensor, "... q n d"]) -> Float[Tensor, "... q n d"]:
        values, U = self.pair
        U = U.to(W.dtype)
        s, rest = values[:, None, :-1].to(W.dtype), values[:, None, -1:].to(W.dtype)
        return ((W @ U) * (s - rest)) @ U.mT + rest * W

    def diagonal(self) -> Float[Tensor, "q d"]:
        values, U = self.pair
        return self.count * torch.stack([axes.squares(u[None].double())[0] @ v for u, v in zip(U, values, strict=True)])

    def trace(self) -> Float[Tensor, " q"]:
        total = self._total
        if total is not None:
            return total.trace
        values, U = self.pair
        return self.count * values @ axes.multiplicities(U)

    def same(self, other: Factor) -> bool:
        if not isinstance(other, LeadingEigen):
            return False
        mine, theirs = self.total, other.total
        return torch.equal(mine.trace, theirs.trace) and torch.equal(mine.Y, theirs.Y)

    def sums(self) -> tuple[Tensor, ...]:
        return self.total.Y, self.total.trace

    def with_sums(self, sums: Iterator[Tensor], count: float) -> LeadingEigen:
        return LeadingEigen(Sketch(next(sums).to(self.dtype), next(sums)), self.leading, count)

    @property
    def packed_shape(self) -> torch.Size:
        q, d, _ = self.held.shape
        return torch.Size((q, d + 2, self.leading.rank))

    def know_packed(self, both: Float[Tensor, "q k r"]) -> None:
        kept = int(both[:, 2:].any(1).any(0).sum())  # directions that were not kept are columns of zeros
        self.know(torch.cat([both[:, 0, :kept], both[:, 1, :1]], -1), both[:, 2:, :kept])


def combined(factors: Sequence[Factor], scales: Sequence[Scalar | float], count: float) -> Factor:
    """Σ c M of sums M; of sketches where one of them is kept as leading directions."""
    leading = next((factor for factor in factors if isinstance(factor, LeadingEigen)), None)
    if leading is None:
        totals = [c * factor.total for c, factor in zip(scales, factors, strict=True) if isinstance(factor, Eigen)]
        return Eigen(reduce(torch.add, totals), count)
    parts = [factor.total for factor in factors if isinstance(factor, Eigen | LeadingEigen)]
    sketches = [part if isinstance(part, Sketch) else Sketch.of(part, leading.leading.rank) for part in parts]
    Y = reduce(torch.add, (c * part.Y for c, part in zip(scales, sketches, strict=True)))
    trace = reduce(torch.add, (c * part.trace for c, part in zip(scales, sketches, strict=True)))
    return LeadingEigen(Sketch(Y, trace), leading.leading, count)


def _in_rows(values: Float[Tensor, "q k"], U: Float[Tensor, "q d r"]) -> Float[Tensor, "q n r"]:
    """Eigenvalues as one row; of leading ones, s and a second row that begins with ρ."""
    if axes.whole(U):
        return values[:, None]
    s, rest = values.split([U.shape[2], 1], -1)
    return torch.stack([s, torch.nn.functional.pad(rest, (0, U.shape[2] - 1))], 1)


def _rounding(total: Float[Tensor, "q d d"]) -> float:
    """Threshold relative to λ_max below which eigenvalues are rounding error: d ε in float64, the solver's error bound.

    A float32 sum is decomposed in float64, so only its entries are rounded. Those errors are independent and add up to
    far less than d ε, so the threshold is ε: d ε (1e-4) would remove eigenvalues that the data determine.
    """
    eps = torch.finfo(total.dtype).eps
    return total.shape[-1] * eps if total.dtype == torch.float64 else eps
