"""The interface of a block of the Jacobian: the columns of some parameter tensors, and their contractions."""

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
    """Number of entries of one row of J, stored as factors and stored densely."""

    factored: int
    dense: int

    @classmethod
    def of(cls, blocks: Sequence[Block], p: int) -> RowSizes:
        return cls(sum(b.row_floats for b in blocks), p)


class Block(ABC):
    """The columns of J (n, c, P) that belong to some parameter tensors."""

    @property
    @abstractmethod
    def slices(self) -> tuple[slice, ...]:
        """Slices of these columns in the P parameters, in the order of `parts`."""

    @abstractmethod
    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        """The dense columns, one array per slice, float64."""

    @abstractmethod
    def entries(self, tensor: slice, at: Int[Tensor, " k"]) -> Float[Tensor, "n c k"]:
        """The columns `at` of one of the tensors, in the model's dtype; other columns are not formed."""

    @property
    @abstractmethod
    def c(self) -> int:
        """Number of rows per datum."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the stored entries."""

    @property
    def attached(self) -> bool:
        """Whether the entries have an autograd graph to the network's inputs."""
        return False

    @property
    def row_floats(self) -> int:
        """Number of stored entries per row."""
        return sum(s.stop - s.start for s in self.slices)

    @property
    def contracted_floats(self) -> int:
        """Number of additional entries per datum during a contraction."""
        return 0

    @abstractmethod
    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        """J v for several vectors."""

    @abstractmethod
    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        """J_n diag(w) J_nᵀ for each datum, restricted to these columns."""

    def quads(self, weights: Float[Tensor, "s p"]) -> Float[Tensor, "s n c c"]:
        return torch.stack([self.quad(w) for w in weights])

    @abstractmethod
    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        """The diagonals of `quad`."""

    def has_factored_cross(self, other: Block, D: GroupedDiagonal) -> bool:
        """Whether `cross` uses the factors; otherwise it needs dense rows, formed a few at a time."""
        return True

    def dense_rows(self) -> Float[Tensor, "nc k"]:
        """Dense rows in the stored dtype, in the block's own order of columns."""
        return torch.cat([part.flatten(0, 1) for part in self.parts()], dim=1)

    def in_fastest_order(self) -> Block:
        """The same entries in the order of columns that is fastest to form; it depends on the layer only."""
        return self

    def entered(self) -> Block:
        """The same columns as a dense block, in the order of the parameters."""
        return self

    def ordered_weights(self, D: GroupedDiagonal) -> Float[Tensor, " k"]:
        """The diagonal of D in the column order of `dense_rows`."""
        return torch.cat([D.diagonal[s] for s in self.slices])

    @abstractmethod
    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        """The kernel J D J'ᵀ of these columns with those of other rows."""

    @abstractmethod
    def doubled(self) -> Block:
        """The same columns in float64."""

    @abstractmethod
    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]:
        """Σ over rows of the squared entries, one tensor per slice."""

    @abstractmethod
    def shifted(self, offset: int) -> Block:
        """The same columns with all slices moved by `offset`."""

    def within(self, where: slice) -> Block | None:
        """The columns inside a slice of the parameters, None if there are none. A tensor is never cut."""
        return self if all(where.start <= s.start and s.stop <= where.stop for s in self.slices) else None

    @abstractmethod
    def concatenated(self, others: Sequence[Block]) -> Block: ...

    @abstractmethod
    def single_rows(self) -> Block:
        """Reshape (n, c) rows to (n · c, 1)."""

    @abstractmethod
    def outputs_at(self, rows: Int[Tensor, " k"]) -> Block:
        """A subset of the c rows of every datum."""

    def plain(self) -> Block:
        """The same columns without implicit or sparse factors, for products with a block of another type."""
        return self

    def fresh(self) -> Block:
        """A copy without cached intermediate results, so that they are freed after a contraction."""
        return self

    def kept(self) -> Block:
        """The same columns in the form that takes the least memory, for long-term storage."""
        return self

    def formed(self) -> Block:
        """The same columns with all lazy parts computed, so that they can be serialised."""
        return self

    @abstractmethod
    def data_at(self, data: slice) -> Block:
        """All rows of a subset of the n data."""

    def pieces(self, n: int) -> list[Block]:
        """The n data in pieces of about equal size whose contractions need little memory."""
        at_most = max(1, _CONTRACTED_FLOATS // max(1, self.contracted_floats))
        step = -(-n // -(-n // at_most))
        return self.split(n, step) if step < n else [self]

    def split(self, n: int, step: int) -> list[Block]:
        """The n data in pieces of `step`."""
        return [self.data_at(slice(start, start + step)) for start in range(0, n, step)]


def padded(tensor: Tensor, r: int, axis: int) -> Tensor:
    """Pad an axis with zeros at its end to length r."""
    missing = r - tensor.shape[axis]
    if not missing:
        return tensor

    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def picked(tensor: Float[Tensor, "n c *rest"], rows: Int[Tensor, " k"]) -> Float[Tensor, "n k *rest"]:
    """A subset of each datum's rows; a single row is a view."""
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
