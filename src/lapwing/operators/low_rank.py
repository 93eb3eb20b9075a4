"""Low-rank curvature: H = Mᵀ diag(c) M with few rows M, handled through the small matrix M P₀⁻¹ Mᵀ.

With M the rows SᵀJ of all training data this is function-space inference: exact, and the smaller side
whenever N·C < P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import StructureError
from lapwing.linalg import semidefinite_eigenvalues
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.conditioning import require_resolved, resolved, smallest_eigenvalue
from lapwing.operators.dense import DenseCurvature
from lapwing.operators.dense_rows import DenseRows
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.written_rows import WrittenRows, written_out

_MOST_DIFFERENCES, _LEAST_LEFT = 1024, 1e-7
_DIGITS = 1e-4  # what the rounding of quick kernels may change in B, relative to the least eigenvalue it can have
_MARGIN = 1e3  # how far variances must stand above the rounding of the kernels they are made of
_MAX_DENSE = 5_000  # parameters
_MAX_CACHED_GROUPS = 32  # beyond this the group kernels would outweigh the rows they save visiting
_KEPT_FLOATS = 1 << 24  # of rows that are kept written out once they were; more are written out piece by piece
_MOST_WRITTEN = 1 << 29


@dataclass(eq=False)
class RootKernels:
    """The rows M with the kernels M E_g Mᵀ of each prior group, kept because tuning asks for them again and again."""

    rows: Rows
    _kept: tuple[Tensor, Float[Tensor, "g r r"]] | None = field(default=None, init=False)  # groups, and their kernels

    def kernel(self, D: GroupedDiagonal) -> Float[Tensor, "r r"]:
        """M D Mᵀ = Σ_g d_g (M E_g Mᵀ)."""
        if D.n_groups > _MAX_CACHED_GROUPS:
            return self.rows.cross(self.rows, D)
        kernels = self.group_kernels(D)
        return (D.values @ kernels.flatten(1)).reshape(kernels.shape[1:])

    def group_kernels(self, D: GroupedDiagonal) -> Float[Tensor, "g r r"]:
        """M E_g Mᵀ of every group, kept; for few groups."""
        kept = self._kept  # read once and written whole: another thread may ask for other groups meanwhile
        if kept is None or not torch.equal(kept[0], D.index):
            kept = D.index, torch.stack([self._group_kernel(E, g) for g, E in enumerate(_groups(D))])
            self._kept = kept
        return kept[1]

    def knows(self, D: GroupedDiagonal) -> bool:
        """Whether the kernels of these groups are at hand."""
        return self._kept is not None and torch.equal(self._kept[0], D.index)

    @cached_property
    def quick(self) -> RootKernels:
        """The same with kernels as exact as the rows themselves, which are made in half the time; see `Rows.quick`."""
        rows = self.rows.quick()
        return self if rows is self.rows else RootKernels(rows)

    @staticmethod
    def keep_together(roots: Sequence[RootKernels], D: GroupedDiagonal) -> None:
        """Have the kernels of several sets of rows at hand: made at once, they share what the rows do."""
        if D.n_groups > _MAX_CACHED_GROUPS or all(root.knows(D) for root in roots):
            return
        rows = [root.rows for root in roots]
        groups = [rows[0].cross_each(rows, rows, E) for E in _groups(D)]
        for root, kernels in zip(roots, zip(*groups, strict=True), strict=True):
            root._kept = D.index, torch.stack(kernels)

    def _group_kernel(self, E: GroupedDiagonal, g: int) -> Float[Tensor, "r r"]:
        """M E_g Mᵀ; a matrix is cut to the group's columns."""
        if not isinstance(self.rows, DenseRows) or E.n_groups == 1:
            return self.rows.cross(self.rows, E)
        M = self.rows.M[:, E.index == g]
        return M @ M.T

    def push(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... r"]:
        """M v."""
        return self.rows.push(v) if self._written is None else v @ self._written.T

    def pull(self, u: Float[Tensor, "... r"]) -> Float[Tensor, "... p"]:
        """Mᵀ u."""
        return self.rows.pull(u) if self._written is None else u @ self._written

    @cached_property
    def _written(self) -> Float[Tensor, "r p"] | None:
        """M, where it is small."""
        size = self.rows.n * self.rows.c * self.rows.p
        return self.rows.dense().reshape(-1, self.rows.p) if size <= _KEPT_FLOATS else None

    @cached_property
    def eigenvalues(self) -> Float[Tensor, " r"]:
        """Nonzero eigenvalues of MᵀM, which are those of M Mᵀ."""
        return semidefinite_eigenvalues(self.kernel(GroupedDiagonal.identity(self.rows.p, self.rows.device)))


def _groups(D: GroupedDiagonal) -> list[GroupedDiagonal]:
    """E_g: one on the parameters of a group, zero elsewhere."""
    one_hot = torch.eye(D.n_groups, dtype=torch.float64, device=D.index.device)
    return [GroupedDiagonal(e, D.index) for e in one_hot]


@dataclass(frozen=True, eq=False)
class LowRankCurvature(Curvature):
    """H = Σ_j c_j m_j m_jᵀ; `scale` is one number, or one per row."""

    root: RootKernels
    scale: Float[Tensor, " ..."]

    @classmethod
    def of(cls, rows: Rows) -> LowRankCurvature:
        return cls(RootKernels(rows), torch.ones((), dtype=torch.float64))

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.root.rows.p

    @property
    def rank(self) -> int:
        return self.root.rows.n * self.root.rows.c

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.root.pull(self.scale * self.root.push(v))

    def diagonal(self) -> Float[Tensor, " p"]:
        if self.scale.ndim == 0:
            return self.scale * self.root.rows.sum_squares()
        return self.scale @ self.root.rows.dense().reshape(self.rank, self.p) ** 2

    def spectrum(self) -> Float[Tensor, " r"]:
        if self.scale.ndim == 0:
            return self.scale * self.root.eigenvalues
        identity = GroupedDiagonal.identity(self.p, self.root.rows.device)
        half = self.scale.sqrt()
        return torch.linalg.eigvalsh(half[:, None] * self.root.kernel(identity) * half).clamp(min=0)

    def scaled(self, c: Scalar) -> LowRankCurvature:
        return replace(self, scale=c * self.scale)

    def mixed(self, others: Sequence[Curvature], scales: Float[Tensor, " g"]) -> Curvature:
        low_rank = [H for H in others if isinstance(H, LowRankCurvature)]
        if len(low_rank) < len(others) or self.rank + sum(H.rank for H in low_rank) >= self.p:
            return DenseCurvature.of(self.to_dense()).mixed(others, scales)  # the matrix is the smaller side now
        return self.as_rows(low_rank, scales)

    def as_rows(self, others: Sequence[LowRankCurvature], scales: Float[Tensor, " g"]) -> LowRankCurvature:
        """The same sum, as rows in any case."""
        parts = (self, *others)
        each = [c * part.scale for c, part in zip(scales, parts, strict=True)]
        rows = RootKernels(stacked([part.root.rows for part in parts]))
        if _one_number(each):  # shards of the same data: nothing tells their rows apart
            return LowRankCurvature(rows, each[0])
        return LowRankCurvature(rows, torch.cat([c.expand(part.rank) for c, part in zip(each, parts, strict=True)]))

    def without(self, other: Curvature) -> DenseCurvature:
        if self.p > _MAX_DENSE:
            raise StructureError(
                f"The curvature is kept as {self.rank} rows of {self.p} parameters; to take data out of it the "
                f"{self.p} × {self.p} matrix is formed, which is refused above {_MAX_DENSE} parameters. Fit again "
                "without these data."
            )
        return DenseCurvature.of(self.to_dense()).without(other)

    def turned(self) -> LowRankCurvature:
        """The same H from rows that belong to no datum: Mᵀ C M = Nᵀ N = (Uᵀ N)ᵀ (Uᵀ N), N Nᵀ = U Λ Uᵀ."""
        if isinstance(self.root.rows, DenseRows) and not self.scale.ndim:  # eigenvectors, or turned already
            return self
        one = self.scale.new_ones(())
        scale, each = (one, self.scale) if self.scale.ndim else (self.scale, one.expand(self.rank))
        N = each.sqrt()[:, None] * self.root.rows.dense().reshape(self.rank, self.p)
        U = torch.linalg.eigh(N @ N.T)[1]
        return LowRankCurvature(RootKernels(WrittenRows(U.T @ N)), scale)

    def plus(self, P0: GroupedDiagonal) -> LowRankPrecision:
        return LowRankPrecision(self, P0)

    def undecomposed(self, P0: GroupedDiagonal) -> Precision:
        """As the matrix, which more data than those of a trial would make of the rows."""
        return DenseCurvature.of(torch.eye(self.p, dtype=torch.float64, device=P0.index.device)).plus(P0)

    def to_dense(self) -> Float[Tensor, "p p"]:
        M = self.root.rows.dense().reshape(self.rank, self.p)
        return (M.T * self.scale) @ M


def _one_number(scales: Sequence[Tensor]) -> bool:
    """Whether all are the same number, and stay so: those that are varied have derivatives of their own."""
    return all(c.ndim == 0 and not c.requires_grad and bool(c == scales[0]) for c in scales)


def stacked(rows: Sequence[Rows]) -> Rows:
    """All rows under each other."""
    if any(r.c != rows[0].c for r in rows):  # as many rows per datum everywhere, or one
        rows = [r.single_rows() for r in rows]
    if len({type(r) for r in rows}) > 1:  # some have lost their factors
        rows = [written_out(r) for r in rows]
    return rows[0].concatenated(rows[1:])


@dataclass(frozen=True, eq=False)
class LowRankPrecision(Precision):
    """P = Nᵀ N + D with N = diag(√c) M and D = P₀, through B = I + N D⁻¹ Nᵀ = L Lᵀ.

    P⁻¹ = D⁻¹ − D⁻¹ Nᵀ B⁻¹ N D⁻¹,   log det P = log det D + log det B.
    """

    H: LowRankCurvature
    P0: GroupedDiagonal

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.H.p

    @cached_property
    def factor(self) -> Float[Tensor, "r r"]:
        B = self._inner
        L, info = torch.linalg.cholesky_ex(B)
        smallest = 0.0 if int(info) else smallest_eigenvalue(L.detach())
        largest = float(torch.linalg.matrix_norm(B.detach()))
        if not resolved(smallest, largest) and self.H.rank * self.p <= _MOST_WRITTEN:
            return self._factor_of_rows()
        require_resolved(smallest, largest, self.p, self.P0)
        return L

    def _factor_of_rows(self) -> Float[Tensor, "r r"]:
        """L from [I, Ñ]ᵀ = Q R with Ñ = N D^-½: B = Rᵀ R, at the square root of B's condition number.

        Several times the cost of Cholesky; for noise so small that B, once formed, has lost its ones to rounding.
        """
        N = self._half_scale[:, None] * self.H.root.rows.dense().reshape(self.H.rank, self.p)
        R = torch.linalg.qr(torch.cat([torch.eye(self.H.rank).to(N), (N * self.P0.diagonal.rsqrt()).mT]))[1]
        return R.mT * R.diagonal().detach().sign()

    @property
    def _inner(self) -> Float[Tensor, "r r"]:
        """B, from quick kernels where their rounding cannot be seen in it.

        They are off by ε √(B_jj B_kk), as if at random, and v ↦ vᵀ B v by ε max B_jj ‖v‖².
        """
        exact, D = self.H.root, self.P0.inverse()
        for root in [exact] if exact.quick is exact or exact.knows(D) else [exact.quick, exact]:
            half = self._half_scale
            B = half[:, None] * root.kernel(D) * half
            # B = I + a positive semi-definite matrix: nothing but rounding can take its eigenvalues below one.
            B.diagonal().add_(1.0)
            if root is exact or root.rows.rounding * float(B.detach().diagonal().max()) <= _DIGITS:
                break
        return B

    @property
    def _half_scale(self) -> Float[Tensor, " r"]:
        return self.H.scale.sqrt().expand(self.H.rank)

    def push(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s r"]:
        """N v."""
        return self._half_scale * self.H.root.push(v)

    def pull(self, u: Float[Tensor, "s r"]) -> Float[Tensor, "s p"]:
        """Nᵀ u."""
        return self.H.root.pull(self._half_scale * u)

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.H.mv(v) + self.P0.diagonal * v

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        u = v.reshape(-1, self.p) / self.P0.diagonal
        inner = torch.cholesky_solve(self.push(u).T, self.factor).T
        return (u - self.pull(inner) / self.P0.diagonal).reshape(v.shape)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        # With Ñ = N D^-½ and I + Ñ Ñᵀ = U diag(s²) Uᵀ, the symmetric W = I − Ñᵀ U diag(1/(s² + s)) Uᵀ Ñ satisfies
        # W W = (I + ÑᵀÑ)⁻¹. So R = D^-½ W, which no turn of the rows changes: draws are those of H, however it is kept.
        half = self.P0.diagonal.rsqrt()
        flat = eps.reshape(-1, self.p)
        s, U = self._eigenbasis
        inner = U @ ((U.T @ self.push(half * flat).T) / (s**2 + s)[:, None])
        return (half * (flat - half * self.pull(inner.T))).reshape(eps.shape)

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        quick = None if J.n * J.c > _MOST_DIFFERENCES else self._as_difference(J, self.whitened(J))
        if quick is not None:
            return quick
        rooted = self._rooted(J).reshape(J.n, J.c, self.p)
        return rooted @ rooted.mT

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        quick = None if J.n * J.c > _MOST_DIFFERENCES else self._as_difference(J, self.whitened(J))
        if quick is not None:
            return quick.diagonal(dim1=-2, dim2=-1)
        return (self._rooted(J) ** 2).sum(-1).reshape(J.n, J.c)

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        W = self._rooted(J)
        return W @ W.T

    def whitened(self, J: Rows) -> Float[Tensor, "r nc"]:
        """L⁻¹ N P₀⁻¹ Jᵀ: what the data explain of J P₀⁻¹ Jᵀ is its square."""
        return self.whitened_kernel(self.H.root.rows.cross(J, self.P0.inverse()))

    def whitened_kernel(self, kernel: Float[Tensor, "r nc"]) -> Float[Tensor, "r nc"]:
        """The same, M P₀⁻¹ Jᵀ being at hand."""
        return torch.linalg.solve_triangular(self.factor, self._half_scale[:, None] * kernel, upper=False)

    def explained(
        self, prior: Float[Tensor, "n c c"], W: Float[Tensor, "r nc"], rounding: float
    ) -> Float[Tensor, "n c c"] | None:
        """J P⁻¹ Jᵀ from J P₀⁻¹ Jᵀ and `whitened(J)`; None where their rounding ε may be seen in its third digit.

        An entry of the kernel that is off by ε √(k_jj k) changes V by 2 ε √(k_jj k) |E k|, and |E k| ≤ ½ √(D k). So V
        is off by ε √(B_jj) k, k being the prior variance.
        """
        largest = float(self.factor.detach().square().sum(1).max())  # of B_jj
        return _difference(prior, W, max(_LEAST_LEFT, _MARGIN * rounding * largest**0.5))

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        if self.H.rank * self.p > _MOST_WRITTEN:
            raise StructureError(
                f"The variances of single weights take {self.H.rank} rows of {self.p} numbers written out, which is "
                "refused. Ask for the variances of outputs, which go through the layers' factors, or for fewer data."
            )
        root = self._half_scale[:, None] * self.H.root.rows.dense().reshape(self.H.rank, self.p)
        W = torch.linalg.solve_triangular(self.factor, root / self.P0.diagonal, upper=False)
        # (P⁻¹)_jj ≥ 1 / P_jj: where the difference is lost in rounding, the bound is what is left.
        bound = 1 / (self.P0.diagonal + (root**2).sum(0))
        return torch.maximum(1 / self.P0.diagonal - (W**2).sum(0), bound)

    def logdet(self) -> Scalar:
        if self.P0.isotropic:
            explained = (self.H.spectrum() / self.P0.values).log1p().sum()
            return explained + self.P0.logdet()
        return 2 * self.factor.diagonal().log().sum() + self.P0.logdet()

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.H.to_dense() + self.P0.diagonal.diag()

    def _as_difference(self, J: Rows, W: Float[Tensor, "r nc"]) -> Float[Tensor, "n c c"] | None:
        """From the rows' factors, and cheap. None where the difference has lost more than seven of its digits."""
        return _difference(J.own(self.P0.inverse()), W, _LEAST_LEFT)

    @cached_property
    def _eigenbasis(self) -> tuple[Float[Tensor, " r"], Float[Tensor, "r r"]]:
        """s and U of B = U diag(s²) Uᵀ, s ≥ 1."""
        U, s, _ = torch.linalg.svd(self.factor)
        return s.clamp(min=1), U  # below one only by rounding

    @cached_property
    def _shifted(self) -> Float[Tensor, "r r"]:
        """I + L."""
        return self.factor + torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)

    def _rooted(self, J: Rows) -> Float[Tensor, "nc p"]:
        """J R, so that J P⁻¹ Jᵀ is a square: prior variance minus what the data explain would lose all its digits."""
        # W = I − Ñᵀ L⁻ᵀ (I + L)⁻¹ Ñ satisfies W Wᵀ = (I + ÑᵀÑ)⁻¹, because T = (I + L)⁻¹ gives
        # T (L Lᵀ − I) Tᵀ = I − T − Tᵀ. So R = D^-½ W is a root of P⁻¹, and needs no eigenvalues.
        half = self.P0.diagonal.rsqrt()
        flat = J.dense().double().reshape(-1, self.p) * half
        inner = torch.linalg.solve_triangular(self.factor.T, self.push(half * flat), upper=True, left=False)
        inner = torch.linalg.solve_triangular(self._shifted, inner, upper=False, left=False)
        return flat - half * self.pull(inner)


def _difference(prior: Float[Tensor, "n c c"], W: Float[Tensor, "r nc"], least: float) -> Float[Tensor, "n c c"] | None:
    """Prior covariance minus what the data explain of it, W²; None where less than this is left of a variance."""
    W = W.reshape(-1, *prior.shape[:2])
    V = prior - torch.einsum("rnc,rnd->ncd", W, W)
    left, whole = (M.detach().diagonal(dim1=-2, dim2=-1) for M in (V, prior))
    return V if bool((left >= least * whole).all()) else None
