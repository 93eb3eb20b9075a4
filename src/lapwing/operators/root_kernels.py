"""Rows M (r, P) of a low-rank curvature with cached kernel matrices M D Mᵀ (r, r)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg import semidefinite_eigenvalues
from lapwing.operators.base import Rows
from lapwing.operators.dense_rows import DenseRows
from lapwing.operators.grouped_diagonal import GroupedDiagonal

_MAX_CACHED_GROUPS = 32  # with more prior groups, cached kernels take more memory than they save time
_KEPT_FLOATS = 1 << 24  # entries up to which dense rows are cached; larger ones are formed piece by piece


@dataclass(eq=False)
class RootKernels:
    """The rows M with cached kernels M E_g Mᵀ of each prior group g: a new prior then costs no pass over the rows."""

    rows: Rows
    _kept: tuple[Tensor, Float[Tensor, "g r r"]] | None = field(default=None, init=False)  # index of groups, kernels

    def kernel(self, D: GroupedDiagonal) -> Float[Tensor, "r r"]:
        """M D Mᵀ = Σ_g d_g (M E_g Mᵀ)."""
        if D.n_groups > _MAX_CACHED_GROUPS:
            return self.rows.cross(self.rows, D)
        kernels = self.group_kernels(D)
        return (D.values @ kernels.flatten(1)).reshape(kernels.shape[1:])

    def group_kernels(self, D: GroupedDiagonal) -> Float[Tensor, "g r r"]:
        """M E_g Mᵀ of every group (g, r, r), cached; for few groups."""
        # Thread safety without a lock: read the attribute once and assign a complete tuple. Another thread may replace
        # it by the kernels of other groups in the meantime.
        kept = self._kept
        if kept is None or not torch.equal(kept[0], D.index):
            kept = D.index, torch.stack([self._group_kernel(E, g) for g, E in enumerate(_groups(D))])
            self._kept = kept
        return kept[1]

    def has_kernels(self, D: GroupedDiagonal) -> bool:
        """Whether the kernels of these groups are cached."""
        return self._kept is not None and torch.equal(self._kept[0], D.index)

    @cached_property
    def quick(self) -> RootKernels:
        """The same with kernels in the dtype of the rows, at half the cost of float64; see `Rows.quick`."""
        rows = self.rows.quick()
        return self if rows is self.rows else RootKernels(rows)

    @staticmethod
    def compute_together(roots: Sequence[RootKernels], D: GroupedDiagonal) -> None:
        """Compute and cache the kernels of several sets of rows together, so that common factors are computed once."""
        if D.n_groups > _MAX_CACHED_GROUPS or all(root.has_kernels(D) for root in roots):
            return
        rows = [root.rows for root in roots]
        groups = [rows[0].cross_each(rows, rows, E) for E in _groups(D)]
        for root, kernels in zip(roots, zip(*groups, strict=True), strict=True):
            root._kept = D.index, torch.stack(kernels)

    def _group_kernel(self, E: GroupedDiagonal, g: int) -> Float[Tensor, "r r"]:
        """M E_g Mᵀ; of a dense M the columns of the group only."""
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
        """M as a dense matrix if it is small, else None."""
        size = self.rows.n * self.rows.c * self.rows.p
        return self.rows.dense().reshape(-1, self.rows.p) if size <= _KEPT_FLOATS else None

    @cached_property
    def eigenvalues(self) -> Float[Tensor, " r"]:
        """Nonzero eigenvalues of MᵀM (P, P), computed as those of M Mᵀ (r, r)."""
        return semidefinite_eigenvalues(self.kernel(GroupedDiagonal.identity(self.rows.p, self.rows.device)))


def _groups(D: GroupedDiagonal) -> list[GroupedDiagonal]:
    """The indicator matrices E_g: diagonal, 1 on the parameters of group g and 0 elsewhere."""
    one_hot = torch.eye(D.n_groups, dtype=torch.float64, device=D.index.device)
    return [GroupedDiagonal(e, D.index) for e in one_hot]
