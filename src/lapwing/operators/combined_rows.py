"""Linear combinations Rᵀ J of other rows, such as inducing functions of a sparse Gaussian process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import StructureError
from lapwing.operators.base import Rows
from lapwing.operators.grouped_diagonal import GroupedDiagonal

if TYPE_CHECKING:
    from lapwing.operators.kronecker_factors import Basis

_WRITTEN_FLOATS = 1 << 23  # entries of dense rows formed at a time


@dataclass(frozen=True, eq=False)
class CombinedRows(Rows):
    """Rᵀ J with R (m, r), presented as r data with one row each. J stays factored."""

    base: Rows
    R: Float[Tensor, "m r"]
    c = 1

    @property
    def n(self) -> int:  # type: ignore[override]
        return self.R.shape[1]

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.base.p

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.R.device

    def dense(self) -> Float[Tensor, "n c p"]:
        return (self.R.T @ self.base.dense().reshape(-1, self.p))[:, None]

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... n c"]:
        return self.push(v)[..., None]

    def push(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... r"]:
        return self.base.push(v) @ self.R

    def pull(self, u: Float[Tensor, "... r"]) -> Float[Tensor, "... p"]:
        return self.base.pull(u @ self.R.T)

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return self.quad_diagonal(weights)[..., None]

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return torch.cat([rows**2 @ weights for rows in self._written_out()])[:, None]

    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        if isinstance(other, CombinedRows):
            return self.R.T @ self.base.cross(other.base, D) @ other.R
        return self.R.T @ self.base.cross(other, D)

    def sum_squares(self) -> Float[Tensor, " p"]:
        return torch.stack([(rows**2).sum(0) for rows in self._written_out()]).sum(0)

    def _written_out(self) -> Iterator[Float[Tensor, "j p"]]:
        """The rows as dense matrices, a few at a time."""
        return (self.base.pull(some) for some in self.R.T.split(max(1, _WRITTEN_FLOATS // self.p)))

    def rotated(self, basis: Basis) -> Rows:
        raise StructureError("Combined rows have no layer's inputs, and cannot be turned into an eigenbasis.")

    def pieces(self) -> Iterator[Rows]:
        yield self

    def columns(self, block: slice) -> CombinedRows:
        return replace(self, base=self.base.columns(block))

    def concatenated(self, others: Sequence[Rows]) -> CombinedRows:
        combined = [self, *(other for other in others if isinstance(other, CombinedRows))]
        if all(rows.base is self.base for rows in combined):  # combinations of the same J: stack R instead
            return replace(self, R=torch.cat([rows.R for rows in combined], 1))
        base = self.base.concatenated([rows.base for rows in combined[1:]])
        return CombinedRows(base, torch.block_diag(*(rows.R for rows in combined)))

    def single_rows(self) -> CombinedRows:
        return self
