"""The two matrix nouns: Curvature H ⪰ 0, which may be singular, and Precision P = H + P₀ ≻ 0.

Vectors are flat with the parameter axis last, so every verb takes (..., P). A third noun, Rows, is what a
Jacobian looks like from here: n × c rows of length P that know cheaper ways to be contracted than `dense()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lapwing._types import Float, Int, Scalar, Tensor
from lapwing.errors import StructureError

if TYPE_CHECKING:
    from typing_extensions import Self

    from lapwing.operators.coordinates import Coordinates
    from lapwing.operators.grouped_diagonal import GroupedDiagonal
    from lapwing.operators.kronecker_factors import Basis


class Rows(ABC):
    """A (n, c, P) array of rows, never stored as such unless `dense()` is called."""

    n: int
    c: int
    p: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """What sums of products with the rows are computed in, where it is one."""
        return torch.float64

    @abstractmethod
    def dense(self) -> Float[Tensor, "n c p"]: ...

    @abstractmethod
    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... n c"]:
        """J v."""

    def push(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... nc"]:
        """J v over all rows, flattened, in double precision whatever the rows are kept in."""
        return v @ self.dense().reshape(-1, self.p).T

    def pull(self, u: Float[Tensor, "... nc"]) -> Float[Tensor, "... p"]:
        """Jᵀ u, likewise."""
        return u @ self.dense().reshape(-1, self.p)

    @abstractmethod
    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        """J diag(w) Jᵀ for each of the n inputs."""

    def quads(self, weights: Float[Tensor, "s p"]) -> Float[Tensor, "s n c c"]:
        """J diag(w) Jᵀ for several weights."""
        return torch.stack([self.quad(w) for w in weights])

    @abstractmethod
    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        """The diagonal of `quad`, without forming it."""

    @abstractmethod
    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        """J D J'ᵀ between all rows of both, flattened."""

    @classmethod
    def cross_each(
        cls, mine: Sequence[Rows], theirs: Sequence[Rows], D: GroupedDiagonal
    ) -> list[Float[Tensor, "nc md"]]:
        """The same of several pairs at once; what they share may be computed once."""
        return [J.cross(K, D) for J, K in zip(mine, theirs, strict=True)]

    @classmethod
    def cross_and_own_each(
        cls, mine: Sequence[Rows], theirs: Sequence[Rows], D: GroupedDiagonal
    ) -> tuple[list[Float[Tensor, "nc md"]], list[Float[Tensor, "m d d"]]]:
        """The same, and `own` of theirs."""
        return cls.cross_each(mine, theirs, D), [K.own(D) for K in theirs]

    def quick(self) -> Rows:
        """The same rows, for kernels whose products are as exact as the rows themselves: up to `rounding`."""
        return self

    @property
    def rounding(self) -> float:
        """Of an entry of a kernel, relative to the lengths of its two rows."""
        return 2.0**-53

    def own(self, D: GroupedDiagonal) -> Float[Tensor, "n c c"]:
        """J D Jᵀ for each of the n inputs, in float64 whatever the rows are kept in."""
        return torch.einsum("ncnd->ncd", self.cross(self, D).reshape(self.n, self.c, self.n, self.c))

    @abstractmethod
    def sum_squares(self) -> Float[Tensor, " p"]:
        """Σ over rows of the squared entries."""

    @abstractmethod
    def rotated(self, basis: Basis) -> Rows:
        """The rows of one layer's matrices W in the coordinates U_Bᵀ W U_A, flattened as (q, o, i)."""

    @abstractmethod
    def pieces(self) -> Iterator[Rows]:
        """All rows of some of the n inputs at a time, few enough to be contracted in little memory."""

    @abstractmethod
    def columns(self, block: slice) -> Rows:
        """The rows restricted to a contiguous block of parameters."""

    @abstractmethod
    def concatenated(self, others: Sequence[Rows]) -> Rows:
        """These rows followed by the others' (same c)."""

    @abstractmethod
    def single_rows(self) -> Rows:
        """The same rows as n · c data with one row each."""

    def outputs_at(self, rows: Int[Tensor, " k"]) -> Rows:
        """Some of the c rows of every datum."""
        raise StructureError("These rows do not belong to the outputs of a datum.")


class Curvature(ABC):
    """H ⪰ 0. It may be singular, so there is no `solve`: the type says what is legal."""

    p: int
    precise: bool = True  # whether determinants and traces are exact, not estimates
    adds_up: bool = False  # whether `addends` of disjoint data add up to those of all: summed over ranks, not gathered
    adds_prior: bool = True  # whether `plus` is H + P₀ exactly, so that eigenvalues shift by a scalar prior

    @abstractmethod
    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """H v."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, " p"]: ...

    @abstractmethod
    def spectrum(self) -> Float[Tensor, " r"]:
        """Eigenvalues of H that may be nonzero (r ≤ P of them); computed once, shared by every `scaled`."""

    def weighted_spectrum(self) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Values λ_k and weights w_k with Σ G(λ) = Σ_k w_k G(λ_k) over the eigenvalues, to rounding.

        For functions that are smooth in log λ and zero at 0, as log(1 + λ/δ) and λ/(λ + δ) are.
        """
        values = self.spectrum()
        return values, torch.ones_like(values)

    def trace(self) -> Scalar:
        return self.diagonal().sum()

    def norm(self) -> Scalar:
        """The largest eigenvalue."""
        return self.spectrum().max()

    @abstractmethod
    def scaled(self, c: Scalar) -> Self:
        """c H, of the same structure."""

    @abstractmethod
    def mixed(self, others: Sequence[Self], scales: Float[Tensor, " g"]) -> Curvature:
        """Σ_g c_g H_g over this curvature and the others, which came out of the same estimator."""

    def joined(self, others: Sequence[Self]) -> Curvature:
        """H of these data and of the others' together, where all were kept in the same structure."""
        return self.mixed(others, torch.ones(1 + len(others), dtype=torch.float64))

    def addends(self) -> tuple[Tensor, ...]:
        """Tensors that are sums over the data; of structures that add up entry by entry."""
        raise StructureError(f"{type(self).__name__} is no sum of tensors.")

    def with_sums(self, sums: Iterator[Tensor]) -> Curvature:
        """The curvature whose addends come next in `sums`."""
        raise StructureError(f"{type(self).__name__} is no sum of tensors.")

    def without(self, other: Self) -> Curvature:
        """H of these data less that of some of them; refused where what is left is not positive semi-definite."""
        raise StructureError(f"{type(self).__name__}: data cannot be taken out of this curvature exactly. Fit again.")

    @abstractmethod
    def plus(self, P0: GroupedDiagonal) -> Precision:
        """H + P₀."""

    def undecomposed(self, P0: GroupedDiagonal) -> Precision:
        """A precision that takes as many bytes as H + P₀, without its factorisation: for measuring memory only."""
        return self.plus(P0)

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates | None:
        """Axes that make H and P₀ diagonal together; None where there are none, or none that is cheap."""
        return None

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "p p"]: ...


class Precision(ABC):
    """P = H + P₀ ≻ 0. `solve`, `logdet` and the quadratic forms are differentiable in P₀ and in the scale of H."""

    p: int
    of_weights: bool = True  # whether there is one set of weights with this precision, or only outputs
    gathers: bool = False  # whether rows are best given many at a time, in the form that takes least memory

    @abstractmethod
    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """P v."""

    @abstractmethod
    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """P⁻¹ v."""

    def rough_solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """P⁻¹ v to single precision where that is cheaper: good enough to precondition with."""
        return self.solve(v)

    def nearby(self) -> Precision:
        """A precision close to this one that is cheap to solve with: itself, unless its solves are iterations."""
        return self

    @abstractmethod
    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """R ε with R Rᵀ = P⁻¹: a draw from N(0, P⁻¹) when ε is standard normal."""

    def draws(self, n: int, *, generator: torch.Generator, device: torch.device) -> Float[Tensor, "n p"]:
        """n draws from N(0, P⁻¹)."""
        eps = torch.randn(n, self.p, generator=generator, dtype=torch.float64, device=generator.device)
        return self.half_solve(eps.to(device))

    @abstractmethod
    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        """J P⁻¹ Jᵀ for each input."""

    @abstractmethod
    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        """The diagonal of `inv_quad`, without forming it."""

    @abstractmethod
    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        """J P⁻¹ Jᵀ across all inputs."""

    @abstractmethod
    def inv_diagonal(self) -> Float[Tensor, " p"]:
        """Marginal variances."""

    @abstractmethod
    def logdet(self) -> Scalar: ...

    def logdet_error(self) -> float:
        """The standard error of `logdet`, where it is an estimate."""
        return 0.0

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "p p"]: ...
