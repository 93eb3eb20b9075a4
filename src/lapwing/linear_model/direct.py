"""Solve Newton's systems of the linear model by a Cholesky factorisation, for few data or few parameters.

With the rows J of all data, Λ = S Sᵀ, D = P₀ and K = J D⁻¹ Jᵀ = Σ_g K_g / δ_g:

    (JᵀΛJ + D)⁻¹ = D⁻¹ − D⁻¹ Jᵀ S (I + Sᵀ K S)⁻¹ Sᵀ J D⁻¹    in function space (dual): R × R
                 = (JᵀΛJ + D)⁻¹                              in weight space (primal): P × P

The kernels K_g are computed once, from the factors of the layers. Rasmussen and Williams (2006), section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.errors import NumericalError
from lapwing.operators import GroupedDiagonal, Rows

Solve = Callable[[Tensor], Tensor]  # (..., p) → (..., p)
Root = Float[Tensor, "n t c m"]  # √κ S of every likelihood term

MOST_SIDE = 2_500  # largest side that is factorised: about half a second in float64
MOST_KERNELS = 1 << 26  # largest size of the kernels of all prior groups together: 512 MiB


@dataclass(eq=False)
class DirectSolver:
    """Caches the kernel of each prior group and the last factor: between two systems only δ and Λ change."""

    J: Float[Tensor, "r p"]  # rows ordered by datum, likelihood term and output
    rows: Rows
    order: Int[Tensor, " r"]  # position in `rows` of every row of J
    _kernels: tuple[Tensor, Float[Tensor, "g r r"]] | None = field(default=None, init=False)
    _last: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False)  # δ, S, and the factor

    @classmethod
    def of(
        cls, J: Sequence[Float[Tensor, "_ k p"]], rows: Sequence[Rows], order: Int[Tensor, " r"], n_groups: int
    ) -> DirectSolver | None:
        """None if neither the number of rows nor that of parameters is small enough."""
        r, p = len(order), J[0].shape[-1]
        if not p or min(r, p) > MOST_SIDE or (r < p and r * r * n_groups > MOST_KERNELS):
            return None
        return cls(torch.cat([part.reshape(-1, p) for part in J])[order], rows[0].concatenated(rows[1:]), order)

    @property
    def dual(self) -> bool:
        return self.J.shape[0] < self.J.shape[1]

    def at(self, P0: GroupedDiagonal, S: Root) -> Solve:
        """A function v ↦ (JᵀS SᵀJ + P₀)⁻¹ v for v of shape (..., p)."""
        L, delta = self._factor(P0, S), P0.diagonal
        if not self.dual:
            return lambda v: torch.cholesky_solve(v.reshape(-1, v.shape[-1]).T, L).T.reshape(v.shape)

        def solve(v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
            w = (v / delta).reshape(-1, v.shape[-1])
            inner = torch.cholesky_solve(_times_root(w @ self.J.T, S).T, L).T
            back = torch.einsum("ntcm,bntm->bntc", S, inner.reshape(-1, *S.shape[:2], S.shape[3]))
            return (w - (back.flatten(1) @ self.J) / delta).reshape(v.shape)

        return solve

    def _factor(self, P0: GroupedDiagonal, S: Root) -> Float[Tensor, "_ _"]:
        """Cholesky factor of I + Sᵀ K S (dual) or JᵀS SᵀJ + P₀ (primal); the last one is cached."""
        last = self._last
        if last is not None and torch.equal(last[0], P0.diagonal) and torch.equal(last[1], S):
            return last[2]
        L, info = torch.linalg.cholesky_ex(self._inner(P0, S) if self.dual else self._precision(P0, S))
        if int(info):
            raise NumericalError(
                "The Hessian of the linear model is not positive definite to rounding: the prior is too weak for "
                "these data, or the likelihood's own Hessian is not positive semi-definite."
            )
        self._last = P0.diagonal.clone(), S.clone(), L
        return L

    def _inner(self, P0: GroupedDiagonal, S: Root) -> Float[Tensor, "k k"]:
        """I + Sᵀ K S, with eigenvalues ≥ 1 whatever the rank of J: the dual system is always positive definite."""
        K = torch.einsum("g,grs->rs", 1 / P0.values, self._group_kernels(P0))
        inner = _times_root(_times_root(K, S).T, S)
        inner.diagonal().add_(1.0)
        return inner

    def _precision(self, P0: GroupedDiagonal, S: Root) -> Float[Tensor, "p p"]:
        """JᵀS SᵀJ + P₀."""
        half = _times_root(self.J.T, S)
        P = half @ half.T
        P.diagonal().add_(P0.diagonal)
        return P

    def _group_kernels(self, P0: GroupedDiagonal) -> Float[Tensor, "g r r"]:
        """K_g = J E_g Jᵀ (g, r, r) with E_g the 0/1 diagonal of prior group g, cached."""
        kept = self._kernels
        if kept is None or not torch.equal(kept[0], P0.index):
            # K_g = J E_g Jᵀ with E_g the 0/1 diagonal of group g: new precisions reuse the kernels.
            one_hot = torch.eye(P0.n_groups, dtype=torch.float64, device=P0.index.device)
            crossed = (self.rows.cross(self.rows, GroupedDiagonal(e, P0.index)) for e in one_hot)
            kept = self._kernels = P0.index, torch.stack([K[self.order][:, self.order] for K in crossed])
        return kept[1]


def _times_root(v: Float[Tensor, "b r"], S: Root) -> Float[Tensor, "b k"]:
    """v S (b, k) for rows v (b, r) over all outputs of all data; S is block-diagonal over likelihood terms."""
    return torch.einsum("bntc,ntcm->bntm", v.reshape(len(v), *S.shape[:3]), S).flatten(1)
