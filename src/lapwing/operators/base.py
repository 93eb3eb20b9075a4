"""Abstract matrices: Curvature H ⪰ 0, which may be singular, Precision P = H + P₀ ≻ 0, and Rows (a Jacobian).

Vectors are flat with the parameter axis last: every method takes (..., P), and leading axes are batch axes. `Rows` is
the interface of a Jacobian J, n × c rows of length P, to the operators: contractions that avoid forming J densely.
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
    """Rows of a Jacobian, (n, c, P): n data with c outputs each. Only `dense()` forms this array."""

    n: int
    c: int
    p: int
    device: torch.device

    @property
    def attached(self) -> bool:
        """Whether the rows have an autograd graph to the network's inputs, so that contractions are differentiable."""
        return False

    def fresh(self) -> Rows:
        """A copy without cached intermediate results, so that they are freed after a contraction."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which contractions over the parameters are computed."""
        return torch.float64

    @abstractmethod
    def dense(self) -> Float[Tensor, "n c p"]: ...

    @abstractmethod
    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... n c"]:
        """J v, in the dtype of the rows."""

    def push(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... nc"]:
        """J v with the axes n and c flattened, in float64 even if the rows are stored in float32."""
        return v @ self.dense().reshape(-1, self.p).T

    def pull(self, u: Float[Tensor, "... nc"]) -> Float[Tensor, "... p"]:
        """Jᵀ u for flattened u, in float64."""
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
        """The kernel J D J'ᵀ between all rows of J (n·c) and of J' (m·d)."""

    @classmethod
    def cross_each(
        cls, mine: Sequence[Rows], theirs: Sequence[Rows], D: GroupedDiagonal
    ) -> list[Float[Tensor, "nc md"]]:
        """`cross` of several pairs; subclasses compute common factors, such as the inputs of a layer, once."""
        return [J.cross(K, D) for J, K in zip(mine, theirs, strict=True)]

    @classmethod
    def cross_and_own_each(
        cls, mine: Sequence[Rows], theirs: Sequence[Rows], D: GroupedDiagonal
    ) -> tuple[list[Float[Tensor, "nc md"]], list[Float[Tensor, "m d d"]]]:
        """`cross` of every pair (J, K), and `own` of every K."""
        return cls.cross_each(mine, theirs, D), [K.own(D) for K in theirs]

    def quick(self) -> Rows:
        """The same rows with kernels computed in the dtype of the rows instead of float64: faster, less accurate."""
        return self

    @property
    def rounding(self) -> float:
        """Relative rounding error of a kernel entry k_ij, in units of ‖j_i‖ ‖j_j‖."""
        return 2.0**-53

    def own(self, D: GroupedDiagonal) -> Float[Tensor, "n c c"]:
        """The diagonal blocks of `cross(self)`: J_n D J_nᵀ for each of the n data, in float64."""
        return torch.einsum("ncnd->ncd", self.cross(self, D).reshape(self.n, self.c, self.n, self.c))

    @abstractmethod
    def sum_squares(self) -> Float[Tensor, " p"]:
        """Σ over all rows of the squared entries, diag JᵀJ."""

    @abstractmethod
    def rotated(self, basis: Basis) -> Rows:
        """The rows of one layer in a Kronecker eigenbasis: every row W (q, o, i) becomes U_Bᵀ W U_A, flattened."""

    @abstractmethod
    def pieces(self) -> Iterator[Rows]:
        """Split the n data into pieces, so that contractions need little memory at a time."""

    @abstractmethod
    def columns(self, block: slice) -> Rows:
        """The rows restricted to a contiguous block of parameters."""

    @abstractmethod
    def concatenated(self, others: Sequence[Rows]) -> Rows:
        """These rows followed by the others, along the axis of data (same c)."""

    @abstractmethod
    def single_rows(self) -> Rows:
        """Reshape (n, c, P) to (n · c, 1, P)."""

    def outputs_at(self, rows: Int[Tensor, " k"]) -> Rows:
        """A subset of the c outputs of every datum: J[:, rows]."""
        raise StructureError("These rows do not belong to the outputs of a datum.")


class Curvature(ABC):
    """Curvature H ⪰ 0, (P, P). H may be singular, so this class has no `solve`."""

    p: int
    precise: bool = True  # whether determinants and traces are exact, not stochastic estimates
    sums_over_ranks: bool = (
        False  # whether H is a sum of tensors over data: distributed fits then sum instead of gathering
    )
    exact_prior: bool = True  # whether `plus` is exactly H + P₀, so that a scalar prior shifts all eigenvalues

    @abstractmethod
    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """H v."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, " p"]: ...

    @abstractmethod
    def spectrum(self) -> Float[Tensor, " r"]:
        """Eigenvalues of H; r ≤ P of them, the others are zero. Computed once and shared with every `scaled`."""

    def weighted_spectrum(self) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
        """Values λ_k and weights w_k with Σ_λ G(λ) = Σ_k w_k G(λ_k) up to rounding; fewer than there are eigenvalues.

        For functions G that are smooth in log λ with G(0) = 0, such as log(1 + λ/δ) and λ/(λ + δ).
        """
        values = self.spectrum()
        return values, torch.ones_like(values)

    def trace(self) -> Scalar:
        return self.diagonal().sum()

    def norm(self) -> Scalar:
        """Spectral norm: the largest eigenvalue."""
        return self.spectrum().max()

    @abstractmethod
    def scaled(self, c: Scalar) -> Self:
        """c H, with the same structure."""

    @abstractmethod
    def mixed(self, others: Sequence[Self], scales: Float[Tensor, " g"]) -> Curvature:
        """Σ_g c_g H_g of this curvature and others from the same pass over the data (the parts of a likelihood)."""

    def joined(self, others: Sequence[Self]) -> Curvature:
        """The curvature of the union of disjoint data sets, each with a curvature of this structure."""
        return self.mixed(others, torch.ones(1 + len(others), dtype=torch.float64))

    def addends(self) -> tuple[Tensor, ...]:
        """Tensors that are sums over data, entry by entry; for structures with `sums_over_ranks`."""
        raise StructureError(f"{type(self).__name__} is no sum of tensors.")

    def with_sums(self, sums: Iterator[Tensor]) -> Curvature:
        """The inverse of `addends`: takes its tensors from the iterator, in the same order."""
        raise StructureError(f"{type(self).__name__} is no sum of tensors.")

    def without(self, other: Self) -> Curvature:
        """Remove the curvature of a subset of the data; raises if the difference is not positive semi-definite."""
        raise StructureError(f"{type(self).__name__}: data cannot be taken out of this curvature exactly. Fit again.")

    @abstractmethod
    def plus(self, P0: GroupedDiagonal) -> Precision:
        """H + P₀."""

    def unfactorised(self, P0: GroupedDiagonal) -> Precision:
        """A precision of the same size in memory without factorisation, to measure memory; its values are wrong."""
        return self.plus(P0)

    def coordinates(self, P0: GroupedDiagonal) -> Coordinates | None:
        """An orthogonal basis in which H and P₀ are both diagonal; None if there is none that is cheap to compute."""
        return None

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "p p"]: ...


class Precision(ABC):
    """P = H + P₀ ≻ 0, (P, P). `solve`, `logdet` and quadratic forms are differentiable in P₀ and the scale of H."""

    p: int
    has_weights: bool = True  # False: only a distribution over outputs, no single weight vector with this precision
    prefers_large_batches: bool = False  # whether quadratic forms should get many rows at once, stored as factors

    @abstractmethod
    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """P v."""

    @abstractmethod
    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """P⁻¹ v."""

    def approximate_solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """P⁻¹ v, possibly in float32 only: for use as a preconditioner."""
        return self.solve(v)

    def preconditioner(self) -> Precision:
        """A similar precision with cheap solves: self, unless `solve` is iterative."""
        return self

    @abstractmethod
    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """R ε with R Rᵀ = P⁻¹: a draw from N(0, P⁻¹) if ε is standard normal."""

    def draws(self, n: int, *, generator: torch.Generator, device: torch.device) -> Float[Tensor, "n p"]:
        """n draws from N(0, P⁻¹)."""
        # Draw on the generator's device: torch refuses a CPU generator for tensors on CUDA.
        eps = torch.randn(n, self.p, generator=generator, dtype=torch.float64, device=generator.device)
        return self.half_solve(eps.to(device))

    @abstractmethod
    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        """J_n P⁻¹ J_nᵀ for each datum: the covariance of the linearised outputs."""

    @abstractmethod
    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        """The diagonal of `inv_quad`, without forming it."""

    @abstractmethod
    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        """J P⁻¹ Jᵀ across all data: the joint covariance of the linearised outputs."""

    @abstractmethod
    def inv_diagonal(self) -> Float[Tensor, " p"]:
        """diag P⁻¹: the marginal variances of the weights."""

    @abstractmethod
    def logdet(self) -> Scalar: ...

    def logdet_error(self) -> float:
        """Standard error of `logdet`; zero unless it is a stochastic estimate."""
        return 0.0

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "p p"]: ...
