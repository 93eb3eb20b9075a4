"""Rows of data with their factors gone, for a curvature that was kept as rows."""

from __future__ import annotations

from dataclasses import dataclass

from lapwing._types import Float, Tensor
from lapwing.operators.base import Rows
from lapwing.operators.dense_rows import DenseRows
from lapwing.operators.grouped_diagonal import GroupedDiagonal


@dataclass(frozen=True, eq=False)
class WrittenRows(DenseRows):
    """All rows of the data: they explain nearly all of a variance, so products with other rows keep every digit."""

    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "n md"]:
        return (D.diagonal * self.M) @ other.dense().flatten(0, 1).double().T


def written_out(rows: Rows) -> WrittenRows:
    return rows if isinstance(rows, WrittenRows) else WrittenRows(rows.dense().flatten(0, 1).double())
