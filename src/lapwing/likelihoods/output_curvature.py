"""Λ of many likelihood terms, in the form a layer whose output is the network's can sum: no column is written out.

A term's Λ (C, C) is a diagonal with ± v vᵀ off it. Sums over terms need the diagonals and the rows v alone, and what a
term contributes along given directions needs two products; S itself, C columns for every term, is never formed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class OutputCurvature(ABC):
    """Λ of terms with any leading axes: off the diagonal it is `sign` · Σ v vᵀ over the term's rows v."""

    sign: float

    @abstractmethod
    def diagonals(self) -> Tensor:
        """Λ_cc: (..., C), non-negative."""

    @abstractmethod
    def rows(self) -> Tensor:
        """The rows v of all terms: (m, C)."""

    @abstractmethod
    def along(self, U: Tensor) -> Tensor:
        """u_kᵀ Λ u_k for the columns of U (C, K): (..., K), non-negative."""


@dataclass(frozen=True, eq=False)
class Columns(OutputCurvature):
    """Λ = S Sᵀ by its columns, S (..., C, K)."""

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
    """Λ = diag d: outputs that do not meet in the likelihood."""

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
        # The variance of u under p, E[u²] − (E u)²: in double precision, a confident term leaves little of it.
        p, U = torch.softmax(self.f.double(), -1), U.double()
        variances = p @ U.square() - (p @ U).square()
        return self.w[..., None] * variances.clamp(min=0)


def complement(p: Tensor) -> Tensor:
    """1 − p without cancellation: an entry near one, and a row has at most one, leaves the sum of the others."""
    rest = 1 - p
    if p.max() > 0.5:
        largest = p.argmax(-1, keepdim=True)
        rest.scatter_(-1, largest, p.scatter(-1, largest, 0.0).sum(-1, keepdim=True))
    return rest
