"""Jacobian rows of the data stored as a dense matrix, without the layers' factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lapwing._types import Float, Tensor
from lapwing.operators.base import Rows
from lapwing.operators.dense_rows import DenseRows
from lapwing.operators.grouped_diagonal import GroupedDiagonal


@dataclass(frozen=True, eq=False)
class WrittenRows(DenseRows):
    """All rows of the training data as a dense float64 matrix.

    Kernels with other rows are computed in float64: the posterior variance is a small difference of two large terms,
    prior variance minus explained variance.
    """

    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "n md"]:
        return (D.diagonal * self.M) @ other.dense().flatten(0, 1).double().T


def written_out(rows: Rows) -> WrittenRows:
    """Form the rows as a dense matrix."""
    return rows if isinstance(rows, WrittenRows) else WrittenRows(rows.dense().flatten(0, 1).double())


def stacked(rows: Sequence[Rows]) -> Rows:
    """Concatenate rows, converting them to a common form."""
    if any(r.c != rows[0].c for r in rows):  # `concatenated` needs the same number of rows per datum
        rows = [r.single_rows() for r in rows]
    if len({type(r) for r in rows}) > 1:  # some are dense, without the layers' factors
        rows = [written_out(r) for r in rows]
    return rows[0].concatenated(rows[1:])
