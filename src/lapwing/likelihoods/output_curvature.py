"""Λ of many likelihood terms in structured form, for the curvature of the output layer with many classes.

Off the diagonal, a term's Λ (C, C) is ± Σ v vᵀ with few vectors v. Sums over terms need only the diagonals and the
vectors v; quadratic forms uᵀ Λ u need two products. The root S, with up to C columns per term, is not formed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class OutputCurvature(ABC):
    """Λ (..., C, C) of terms with any leading axes. Off the diagonal Λ = `sign` · Σ v vᵀ over the term's vectors v."""

    sign: float

    @abstractmethod
    def diagonals(self) -> Tensor:
        """Λ_cc: (..., C), non-negative."""

    @abstractmethod
    def rows(self) -> Tensor:
        """The vectors v of all terms as rows: (m, C)."""

    @abstractmethod
    def along(self, U: Tensor) -> Tensor:
        """u_kᵀ Λ u_k for the columns of U (C, K): (..., K), non-negative."""


@dataclass(frozen=True, eq=False)
class Columns(OutputCurvature):
    """Λ = S Sᵀ from its root S (..., C, K)."""

    S: Tensor
    sign = 1.0

    def diagonals(self) -> Tensor:
        return self.S.square().sum(-1)

    def rows(self) -> Tensor:
        return self.S.mT.reshape(-1, self.S.shape[-2])

    def along(self, U: Tensor) -> Tensor:
        return (self.S.mT @ U.to(self.S.dtype)).square().sum(-2)


@dataclass(frozen=True, eq=False)
class Independent(OutputCurvature):
    """Λ = diag d, for outputs that are independent in the likelihood."""

    d: Tensor
    sign = 1.0

    def diagonals(self) -> Tensor:
        return self.d

    def rows(self) -> Tensor:
        return self.d.new_zeros(0, self.d.shape[-1])

    def along(self, U: Tensor) -> Tensor:
        return self.d @ U.to(self.d.dtype).square()


@dataclass(frozen=True, eq=False)
class Softmax(OutputCurvature):
    """Λ = w (diag p − p pᵀ),  p = softmax f."""

    f: Tensor
    w: Tensor  # (...)
    sign = -1.0

    @cached_property
    def p(self) -> Tensor:
        return torch.softmax(self.f, -1)

    def diagonals(self) -> Tensor:
        return self.w[..., None] * self.p * complement(self.p)

    def rows(self) -> Tensor:
        return (self.w.sqrt()[..., None] * self.p).reshape(-1, self.p.shape[-1])

    def along(self, U: Tensor) -> Tensor:
        # uᵀ Λ u = Var_p[u] = E[u²] − (E u)², in float64: for a confident prediction the difference nearly cancels.
        p, U = torch.softmax(self.f.double(), -1), U.double()
        variances = p @ U.square() - (p @ U).square()
        return self.w[..., None] * variances.clamp(min=0)


def complement(p: Tensor) -> Tensor:
    """1 − p without cancellation: for an entry above ½, at most one per row, it is the sum of the other entries."""
    rest = 1 - p
    if p.max() > 0.5:
        largest = p.argmax(-1, keepdim=True)
        rest.scatter_(-1, largest, p.scatter(-1, largest, 0.0).sum(-1, keepdim=True))
    return rest
