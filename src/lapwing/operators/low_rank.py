"""Low-rank curvature H = Mᵀ diag(c) M with M (r, P), handled through the kernel matrix M P₀⁻¹ Mᵀ (r, r).

With M the rows SᵀJ of all training data this is Gaussian process inference with the kernel J P₀⁻¹ J'ᵀ. It is exact, and
cheaper than the dense (P, P) matrix if N·C < P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import StructureError
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.conditioning import require_resolved, resolved, smallest_eigenvalue
from lapwing.operators.dense import DenseCurvature
from lapwing.operators.dense_rows import DenseRows
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.root_kernels import RootKernels
from lapwing.operators.written_rows import WrittenRows, stacked

_MOST_DIFFERENCES, _LEAST_LEFT = 1024, 1e-7  # rows for which variances are differences, and the smallest ratio allowed
_DIGITS = 1e-4  # largest error of B from kernels in float32, relative to its smallest possible eigenvalue, 1
_MARGIN = 1e3  # smallest ratio of a variance to the rounding error of the kernels it is computed from
_MAX_DENSE = 5_000  # parameters up to which the (P, P) matrix may be formed
_MOST_WRITTEN = 1 << 29  # entries of dense rows that are ever formed at once: 4 GiB


@dataclass(frozen=True, eq=False)
class LowRankCurvature(Curvature):
    """H = Σ_j c_j m_j m_jᵀ of rows m_j; `scale` holds c, one number or one per row."""

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
            # r ≥ P: the dense (P, P) matrix is now smaller than the kernel (r, r).
            return DenseCurvature.of(self.to_dense()).mixed(others, scales)
        return self.as_rows(low_rank, scales)

    def as_rows(self, others: Sequence[LowRankCurvature], scales: Float[Tensor, " g"]) -> LowRankCurvature:
        """The same sum, always as concatenated rows."""
        parts = (self, *others)
        each = [c * part.scale for c, part in zip(scales, parts, strict=True)]
        rows = RootKernels(stacked([part.root.rows for part in parts]))
        if _one_number(each):  # one common scale keeps the fast paths for a scalar, such as the cached eigenvalues
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

    def in_eigenbasis(self) -> LowRankCurvature:
        """The same H with rows that do not reveal single data points: Mᵀ C M = Nᵀ N = (Uᵀ N)ᵀ (Uᵀ N), N Nᵀ = U Λ Uᵀ."""
        if isinstance(self.root.rows, DenseRows) and not self.scale.ndim:  # eigenvectors already
            return self
        one = self.scale.new_ones(())
        scale, each = (one, self.scale) if self.scale.ndim else (self.scale, one.expand(self.rank))
        N = each.sqrt()[:, None] * self.root.rows.dense().reshape(self.rank, self.p)
        U = torch.linalg.eigh(N @ N.T)[1]  # orthogonal (r, r): UᵀN mixes the rows of all data
        return LowRankCurvature(RootKernels(WrittenRows(U.T @ N)), scale)

    def plus(self, P0: GroupedDiagonal) -> LowRankPrecision:
        return LowRankPrecision(self, P0)

    def unfactorised(self, P0: GroupedDiagonal) -> Precision:
        """A dense precision: with all data r ≥ P is likely, though not in the small trial that measures memory."""
        return DenseCurvature.of(torch.eye(self.p, dtype=torch.float64, device=P0.index.device)).plus(P0)

    def to_dense(self) -> Float[Tensor, "p p"]:
        M = self.root.rows.dense().reshape(self.rank, self.p)
        return (M.T * self.scale) @ M


def _one_number(scales: Sequence[Tensor]) -> bool:
    """Whether all scales are the same constant. Scales that require grad may be tuned separately, even if equal now."""
    return all(c.ndim == 0 and not c.requires_grad and bool(c == scales[0]) for c in scales)


@dataclass(frozen=True, eq=False)
class LowRankPrecision(Precision):
    """P = Nᵀ N + D with N = diag(√c) M and D = P₀, by the Woodbury identity with B = I + N D⁻¹ Nᵀ = L Lᵀ (r, r).

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
        # cholesky_ex returns a status instead of raising, so that a failed factorisation can fall back to QR below.
        L, info = torch.linalg.cholesky_ex(B)
        smallest = 0.0 if int(info) else smallest_eigenvalue(L.detach())
        largest = float(torch.linalg.matrix_norm(B.detach()))
        if not resolved(smallest, largest) and self.H.rank * self.p <= _MOST_WRITTEN:
            return self._factor_of_rows()
        require_resolved(smallest, largest, self.p, self.P0)
        return L

    def _factor_of_rows(self) -> Float[Tensor, "r r"]:
        """L by QR instead of Cholesky: [I, Ñ]ᵀ = Q R with Ñ = N D^-½ gives B = Rᵀ R without forming B.

        Needs only the square root of B's condition number, at several times the cost. For noise so small that in
        B = I + Ñ Ñᵀ the identity is lost in rounding.
        """
        N = self._half_scale[:, None] * self.H.root.rows.dense().reshape(self.H.rank, self.p)
        R = torch.linalg.qr(torch.cat([torch.eye(self.H.rank).to(N), (N * self.P0.diagonal.rsqrt()).mT]))[1]
        return (
            R.mT * R.diagonal().detach().sign()
        )  # QR leaves the signs open; a Cholesky factor has a positive diagonal

    @property
    def _inner(self) -> Float[Tensor, "r r"]:
        """B, from kernels in the dtype of the rows if their rounding error is negligible, else from float64 kernels.

        The error of an entry is about ε √(B_jj B_kk) with random sign, that of vᵀ B v about ε max B_jj ‖v‖².
        """
        exact, D = self.H.root, self.P0.inverse()
        for root in [exact] if exact.quick is exact or exact.has_kernels(D) else [exact.quick, exact]:
            half = self._half_scale
            B = half[:, None] * root.kernel(D) * half
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
        # P⁻¹v = u − D⁻¹ Nᵀ B⁻¹ N u with u = D⁻¹v
        u = v.reshape(-1, self.p) / self.P0.diagonal
        inner = torch.cholesky_solve(self.push(u).T, self.factor).T
        return (u - self.pull(inner) / self.P0.diagonal).reshape(v.shape)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        # With Ñ = N D^-½ and I + Ñ Ñᵀ = U diag(s²) Uᵀ, the symmetric W = I − Ñᵀ U diag(1/(s² + s)) Uᵀ Ñ satisfies
        # W W = (I + ÑᵀÑ)⁻¹, so R = D^-½ W is a root of P⁻¹. It is invariant to an orthogonal transformation of the
        # rows, so a posterior gives the same draws before saving and after loading (`in_eigenbasis`).
        half = self.P0.diagonal.rsqrt()
        flat = eps.reshape(-1, self.p)
        s, U = self._eigenbasis
        inner = U @ ((U.T @ self.push(half * flat).T) / (s**2 + s)[:, None])
        return (half * (flat - half * self.pull(inner.T))).reshape(eps.shape)

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        # The difference of factored kernels is fast; the Gram matrix of dense rows is accurate in all cases.
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
        """W = L⁻¹ N P₀⁻¹ Jᵀ, so that J P⁻¹ Jᵀ = J P₀⁻¹ Jᵀ − WᵀW: prior variance minus explained variance."""
        return self.whitened_kernel(self.H.root.rows.cross(J, self.P0.inverse()))

    def whitened_kernel(self, kernel: Float[Tensor, "r nc"]) -> Float[Tensor, "r nc"]:
        """W from the kernel M P₀⁻¹ Jᵀ."""
        return torch.linalg.solve_triangular(self.factor, self._half_scale[:, None] * kernel, upper=False)

    def explained(
        self, prior: Float[Tensor, "n c c"], W: Float[Tensor, "r nc"], rounding: float
    ) -> Float[Tensor, "n c c"] | None:
        """J P⁻¹ Jᵀ = prior − WᵀW; None if the rounding error ε of the kernels could reach its third digit.

        An error ε √(k_jj k) of a kernel entry changes the variance V by 2 ε √(k_jj k) |E k|, and |E k| ≤ ½ √(D k).
        So the error of V is at most about ε √(B_jj) k, where k is the prior variance.
        """
        largest = float(self.factor.detach().square().sum(1).max())  # of B_jj
        return _difference(prior, W, max(_LEAST_LEFT, _MARGIN * rounding * largest**0.5))

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        if self.H.rank * self.p > _MOST_WRITTEN:
            raise StructureError(
                f"The marginal variances of the weights need a dense matrix of {self.H.rank} × {self.p} entries, more "
                f"than the limit of {_MOST_WRITTEN}. Use the variances of outputs, which need no dense rows, or fit on "
                "fewer data."
            )
        root = self._half_scale[:, None] * self.H.root.rows.dense().reshape(self.H.rank, self.p)
        W = torch.linalg.solve_triangular(self.factor, root / self.P0.diagonal, upper=False)
        # The difference may be all rounding error, even negative. Then (P⁻¹)_jj ≥ 1 / P_jj is the best known value.
        bound = 1 / (self.P0.diagonal + (root**2).sum(0))
        return torch.maximum(1 / self.P0.diagonal - (W**2).sum(0), bound)

    def logdet(self) -> Scalar:
        if self.P0.isotropic:
            # log det(I + H/δ) = Σ log(1 + λ/δ): one eigendecomposition serves every δ
            explained = (self.H.spectrum() / self.P0.values).log1p().sum()
            return explained + self.P0.logdet()
        return 2 * self.factor.diagonal().log().sum() + self.P0.logdet()

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.H.to_dense() + self.P0.diagonal.diag()

    def _as_difference(self, J: Rows, W: Float[Tensor, "r nc"]) -> Float[Tensor, "n c c"] | None:
        """Prior minus explained variance, from factored rows: cheap. None if more than 7 digits cancel."""
        return _difference(J.own(self.P0.inverse()), W, _LEAST_LEFT)

    @cached_property
    def _eigenbasis(self) -> tuple[Float[Tensor, " r"], Float[Tensor, "r r"]]:
        """s and U of B = U diag(s²) Uᵀ, s ≥ 1."""
        # The SVD of L gives s to full relative accuracy; eigenvalues of B = L Lᵀ are their squares.
        U, s, _ = torch.linalg.svd(self.factor)
        return s.clamp(min=1), U  # below 1 by rounding only

    @cached_property
    def _shifted(self) -> Float[Tensor, "r r"]:
        """I + L."""
        return self.factor + torch.eye(len(self.factor), dtype=self.factor.dtype, device=self.factor.device)

    def _rooted(self, J: Rows) -> Float[Tensor, "nc p"]:
        """J R with R Rᵀ = P⁻¹, so that J P⁻¹ Jᵀ is a Gram matrix: no cancellation, unlike prior minus explained."""
        # W = I − Ñᵀ L⁻ᵀ (I + L)⁻¹ Ñ satisfies W Wᵀ = (I + ÑᵀÑ)⁻¹, because T = (I + L)⁻¹ gives
        # T (L Lᵀ − I) Tᵀ = I − T − Tᵀ. So R = D^-½ W is a root of P⁻¹, and needs no eigenvalues.
        half = self.P0.diagonal.rsqrt()
        flat = J.dense().double().reshape(-1, self.p) * half
        inner = torch.linalg.solve_triangular(self.factor.T, self.push(half * flat), upper=True, left=False)
        inner = torch.linalg.solve_triangular(self._shifted, inner, upper=False, left=False)
        return flat - half * self.pull(inner)


def _difference(prior: Float[Tensor, "n c c"], W: Float[Tensor, "r nc"], least: float) -> Float[Tensor, "n c c"] | None:
    """prior − WᵀW per datum; None if a variance drops below the fraction `least` of its prior variance."""
    W = W.reshape(-1, *prior.shape[:2])
    V = prior - torch.einsum("rnc,rnd->ncd", W, W)
    left, whole = (M.detach().diagonal(dim1=-2, dim2=-1) for M in (V, prior))
    return V if bool((left >= least * whole).all()) else None
