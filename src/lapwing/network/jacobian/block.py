"""What a block of the Jacobian must say: the columns of some parameter tensors, and how they are contracted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.operators import GroupedDiagonal

_CONTRACTED_FLOATS = 1 << 22
_MANY_WEIGHTS = 4  # from which on products of rows are kept for all of them


@dataclass(frozen=True)
class RowSizes:
    """Numbers one row of J takes: as factors of all layers, and written out."""

    factored: int
    dense: int

    @classmethod
    def of(cls, blocks: Sequence[Block], p: int) -> RowSizes:
        return cls(sum(b.row_floats for b in blocks), p)


class Block(ABC):
    """The columns of J that belong to some parameter tensors; (n, c) rows."""

    @property
    @abstractmethod
    def slices(self) -> tuple[slice, ...]:
        """Where these columns stand among the P parameters, in the order of `parts`."""

    @abstractmethod
    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        """The dense columns, one array per slice, float64."""

    @abstractmethod
    def entries(self, tensor: slice, at: Int[Tensor, " k"]) -> Float[Tensor, "n c k"]:
        """Some of the columns of one of the tensors, in the model's dtype; no others are formed."""

    @property
    @abstractmethod
    def c(self) -> int:
        """Rows of a datum."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What the entries are kept in."""

    @property
    def row_floats(self) -> int:
        """Numbers that one row takes as it is kept."""
        return sum(s.stop - s.start for s in self.slices)

    @property
    def contracted_floats(self) -> int:
        """Numbers that the rows of one datum take, besides, while they are contracted."""
        return 0

    @abstractmethod
    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        """J v for some vectors."""

    @abstractmethod
    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]: ...

    def quads(self, weights: Float[Tensor, "s p"]) -> Float[Tensor, "s n c c"]:
        return torch.stack([self.quad(w) for w in weights])

    @abstractmethod
    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]: ...

    def meets_as_factors(self, other: Block, D: GroupedDiagonal) -> bool:
        """Whether `cross` goes through small products; else entries are written out, few at a time."""
        return True

    def written(self) -> Float[Tensor, "nc k"]:
        """All entries of the rows in an order of the block's own, in the dtype they are kept in."""
        return torch.cat([part.flatten(0, 1) for part in self.parts()], dim=1)

    def in_any_order(self) -> Block:
        """The same entries in the order that is written out most quickly: one order for all data of a layer."""
        return self

    def entered(self) -> Block:
        """The same columns in the parameters' order, written out."""
        return self

    def written_weights(self, D: GroupedDiagonal) -> Float[Tensor, " k"]:
        """D in that order."""
        return torch.cat([D.diagonal[s] for s in self.slices])

    @abstractmethod
    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]: ...

    @abstractmethod
    def doubled(self) -> Block:
        """The same columns in float64."""

    @abstractmethod
    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]: ...

    @abstractmethod
    def shifted(self, offset: int) -> Block:
        """The same columns in a parameter vector that starts `offset` later."""

    def within(self, where: slice) -> Block | None:
        """The columns inside a slice of the parameters, if any; tensors are never cut."""
        return self if all(where.start <= s.start and s.stop <= where.stop for s in self.slices) else None

    @abstractmethod
    def concatenated(self, others: Sequence[Block]) -> Block: ...

    @abstractmethod
    def single_rows(self) -> Block:
        """(n, c) rows as (n · c, 1)."""

    @abstractmethod
    def outputs_at(self, rows: Int[Tensor, " k"]) -> Block:
        """Some of the c rows of every datum."""

    def plain(self) -> Block:
        """The same columns with nothing left implicit, for a block of another kind to meet."""
        return self

    def kept(self) -> Block:
        """The same columns in the form that takes least memory."""
        return self

    def formed(self) -> Block:
        """The same columns, to be sent elsewhere: all they are made of is there."""
        return self

    @abstractmethod
    def data_at(self, data: slice) -> Block:
        """All rows of some of the n data."""

    def pieces(self, n: int) -> list[Block]:
        """All rows of the n data, of so few at a time that contracting them takes little memory."""
        at_most = max(1, _CONTRACTED_FLOATS // max(1, self.contracted_floats))
        step = -(-n // -(-n // at_most))  # in equal parts
        return [self.data_at(slice(start, start + step)) for start in range(0, n, step)] if step < n else [self]


def padded(tensor: Tensor, r: int, axis: int) -> Tensor:
    """Zeros behind the entries of an axis until there are r."""
    missing = r - tensor.shape[axis]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def picked(tensor: Float[Tensor, "n c *rest"], rows: Int[Tensor, " k"]) -> Float[Tensor, "n k *rest"]:
    """Some rows of each datum; a single one is not copied."""
    return tensor.narrow(1, int(rows[0]), 1) if len(rows) == 1 else tensor[:, rows]


def summed(terms: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, terms)


def contracted(rows: Float[Tensor, "n c k"], weights: Float[Tensor, "s k"]) -> Float[Tensor, "s n c c"]:
    """Σ_k w_sk J_ck J_dk: products of two rows once, then all weights in one product of matrices."""
    if len(weights) < _MANY_WEIGHTS:
        return torch.stack([(rows * w) @ rows.mT for w in weights])
    n, c, _ = rows.shape
    out = rows.new_empty(n, c, c, len(weights))
    for k in range(c):
        products = (rows[:, k, None] * rows[:, k:]).flatten(0, 1) @ weights.T
        out[:, k, k:] = out[:, k:, k] = products.view(n, c - k, -1)
    return out.permute(3, 0, 1, 2)
