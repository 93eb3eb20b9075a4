"""Rows stored as a dense matrix, such as eigenvectors, which have no factorisation by layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lapwing._types import Float, Tensor
from lapwing.operators.base import Rows
from lapwing.operators.grouped_diagonal import GroupedDiagonal

if TYPE_CHECKING:
    from lapwing.operators.kronecker_factors import Basis


@dataclass(frozen=True, eq=False)
class DenseRows(Rows):
    """M (r, P) as r data with one row each."""

    M: Float[Tensor, "r p"]
    c = 1

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.M.shape[0]

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.M.shape[1]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.M.device

    def dense(self) -> Float[Tensor, "n 1 p"]:
        return self.M[:, None]

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... n 1"]:
        return (v @ self.M.T)[..., None]

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n 1 1"]:
        return self.quad_diagonal(weights)[..., None]

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n 1"]:
        return (self.M**2 @ weights)[:, None]

    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "n md"]:
        scaled = D.diagonal * self.M
        if isinstance(other, DenseRows):
            return scaled @ other.M.T
        return other.mv(scaled).double().reshape(self.n, -1)  # M D J'ᵀ = (J' D Mᵀ)ᵀ without forming J' densely

    def sum_squares(self) -> Float[Tensor, " p"]:
        return (self.M**2).sum(0)

    def rotated(self, basis: Basis) -> Rows:
        raise NotImplementedError("Rows without factors are not one layer's.")

    def pieces(self) -> Iterator[Rows]:
        yield self

    def columns(self, block: slice) -> DenseRows:
        return replace(self, M=self.M[:, block])

    def concatenated(self, others: Sequence[Rows]) -> DenseRows:
        return replace(self, M=torch.cat([self.M, *(rows.dense().flatten(0, 1) for rows in others)]))

    def single_rows(self) -> DenseRows:
        return self
