"""The Jacobian as a value: one block per parameter tensor or layer, factored where the layer allows it.

For a linear layer s_t = W a_t + b used at positions t, ∂f_c/∂W = Σ_t g_ct a_tᵀ with g = ∂f_c/∂s_t. The factors
(a, g) are the whole block; contractions work on them and nothing of size n · c · P is formed. Blocks without
factors are dense. Everything is float64, whatever the model computes in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.operators import GroupedDiagonal, Rows

_CACHED_FLOATS = 1 << 17  # one megabyte of float64


class Block(ABC):
    """The columns of J that belong to some parameter tensors; (n, c) rows."""

    @property
    @abstractmethod
    def slices(self) -> tuple[slice, ...]:
        """Where these columns stand among the P parameters, in the order of `parts`."""

    @abstractmethod
    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        """The dense columns, one array per slice."""

    @property
    def row_floats(self) -> int:
        """Numbers that one row takes while it is contracted."""
        return sum(s.stop - s.start for s in self.slices)

    @abstractmethod
    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]: ...

    @abstractmethod
    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]: ...

    @abstractmethod
    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]: ...

    @abstractmethod
    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]: ...

    @abstractmethod
    def shifted(self, offset: int) -> Block:
        """The same columns in a parameter vector that starts `offset` later."""

    @abstractmethod
    def concatenated(self, others: Sequence[Block]) -> Block: ...

    @abstractmethod
    def single_rows(self) -> Block:
        """(n, c) rows as (n · c, 1)."""

    @abstractmethod
    def outputs_at(self, rows: Int[Tensor, " k"]) -> Block:
        """Some of the c rows of every datum."""

    @abstractmethod
    def data_at(self, data: slice) -> Block:
        """All rows of some of the n data."""


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """All entries of the columns of one parameter tensor."""

    where: slice
    values: Float[Tensor, "n c k"]

    @property
    def slices(self) -> tuple[slice, ...]:
        return (self.where,)

    def parts(self) -> tuple[Float[Tensor, "n c k"], ...]:
        return (self.values,)

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return (self.values * weights[self.where]) @ self.values.mT

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return self.values**2 @ weights[self.where]

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        (values,) = other.parts()
        return (self.values.flatten(0, 1) * D.diagonal[self.where]) @ values.flatten(0, 1).T

    def sum_squares(self) -> tuple[Float[Tensor, " k"], ...]:
        return ((self.values**2).sum((0, 1)),)

    def shifted(self, offset: int) -> DenseBlock:
        return replace(self, where=_shift(self.where, offset))

    def concatenated(self, others: Sequence[Block]) -> DenseBlock:
        return replace(self, values=torch.cat([self.values, *(other.parts()[0] for other in others)]))

    def single_rows(self) -> DenseBlock:
        return replace(self, values=self.values.flatten(0, 1)[:, None])

    def outputs_at(self, rows: Int[Tensor, " k"]) -> DenseBlock:
        return replace(self, values=self.values[:, rows])

    def data_at(self, data: slice) -> DenseBlock:
        return replace(self, values=self.values[data])


@dataclass(frozen=True, eq=False)
class LinearBlock(Block):
    """A linear layer's columns as factors; `weight` or `bias` is None when that tensor is not inferred."""

    weight: slice | None
    bias: slice | None
    a: Float[Tensor, "n r i"]
    g: Float[Tensor, "n c r o"]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(s for s in (self.weight, self.bias) if s is not None)

    @property
    def row_floats(self) -> int:
        if not self._one_position:
            return super().row_floats
        return self.a.shape[2] + self.g.shape[3]

    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        dense = []
        if self.weight is not None:
            dense.append(torch.einsum("ncro,nri->ncoi", self.g, self.a).flatten(2))
        if self.bias is not None:
            dense.append(self.g.sum(2))
        return tuple(dense)

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        if not self._one_position:
            return _summed(piece.quad(weights) for piece in self._dense_blocks)
        # Σ_oi g_co g_do a_i² w_oi = Σ_o g_co g_do q_o with q = W a² + w_b
        g = self.g[:, :, 0]
        return (g * self._output_weights(weights)[:, None]) @ g.mT

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        if not self._one_position:
            return _summed(piece.quad_diagonal(weights) for piece in self._dense_blocks)
        return (self.g[:, :, 0] ** 2 @ self._output_weights(weights)[:, :, None])[..., 0]

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        weight, bias = (None if s is None else D.constant_on(s) for s in (self.weight, self.bias))
        factored = isinstance(other, LinearBlock) and self._one_position and other._one_position
        if not factored or (weight is None) != (self.weight is None) or (bias is None) != (self.bias is None):
            pieces = zip(self._dense_blocks, DenseBlocks.of(other), strict=True)
            return _summed(mine.cross(theirs, D) for mine, theirs in pieces)
        # (g·g')(d_w a·a' + d_b): two small Gram matrices instead of one over all weights
        assert isinstance(other, LinearBlock)
        zero = self.a.new_zeros(())
        scaled = self.a[:, 0] * (zero if weight is None else weight)
        inputs = torch.addmm((zero if bias is None else bias).reshape(1, 1), scaled, other.a[:, 0].T)
        outputs = self.g[:, :, 0].flatten(0, 1) @ other.g[:, :, 0].flatten(0, 1).T
        if self.g.shape[1] == other.g.shape[1] == 1:
            return outputs * inputs
        shape = (self.g.shape[0], self.g.shape[1], other.g.shape[0], other.g.shape[1])
        return (outputs.view(shape) * inputs[:, None, :, None]).view_as(outputs)

    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]:
        squares = []
        if self.weight is not None and self._one_position:
            squares.append(((self.g[:, :, 0] ** 2).sum(1).T @ self.a[:, 0] ** 2).flatten())
        elif self.weight is not None:
            # One output at a time: a batch × weights array is needed when positions add up, outputs are not.
            per_output = (torch.einsum("nro,nri->noi", g, self.a) for g in self.g.unbind(1))
            squares.append(_summed((w**2).sum(0) for w in per_output).flatten())
        if self.bias is not None:
            squares.append((self.g.sum(2) ** 2).sum((0, 1)))
        return tuple(squares)

    def shifted(self, offset: int) -> LinearBlock:
        weight = None if self.weight is None else _shift(self.weight, offset)
        return replace(self, weight=weight, bias=None if self.bias is None else _shift(self.bias, offset))

    def concatenated(self, others: Sequence[Block]) -> Block:
        same = [other for other in others if isinstance(other, LinearBlock) and other.a.shape[1] == self.a.shape[1]]
        if len(same) != len(others):  # other numbers of positions (sequences of other lengths): no common factor array
            merged = [
                mine.concatenated(theirs)
                for mine, *theirs in zip(self._dense_blocks, *(DenseBlocks.of(o) for o in others), strict=True)
            ]
            return DenseBlocks(tuple(merged))
        return replace(self, a=torch.cat([self.a, *(o.a for o in same)]), g=torch.cat([self.g, *(o.g for o in same)]))

    def single_rows(self) -> LinearBlock:
        return replace(self, a=self.a.repeat_interleave(self.g.shape[1], 0), g=self.g.flatten(0, 1)[:, None])

    def outputs_at(self, rows: Int[Tensor, " k"]) -> LinearBlock:
        return replace(self, g=self.g[:, rows])

    def data_at(self, data: slice) -> LinearBlock:
        return replace(self, a=self.a[data], g=self.g[data])

    @property
    def _one_position(self) -> bool:
        return self.a.shape[1] == 1

    @property
    def _dense_blocks(self) -> tuple[DenseBlock, ...]:
        return tuple(DenseBlock(s, part) for s, part in zip(self.slices, self.parts(), strict=True))

    def _output_weights(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n o"]:
        q = self.a.new_zeros(self.g.shape[0], self.g.shape[3])
        if self.weight is not None:
            q = q + self.a[:, 0] ** 2 @ weights[self.weight].view(self.g.shape[3], self.a.shape[2]).T
        return q if self.bias is None else q + weights[self.bias]


@dataclass(frozen=True, eq=False)
class DenseBlocks(Block):
    """Several dense blocks that stand for one factored block (its weight and its bias)."""

    pieces: tuple[DenseBlock, ...]

    @staticmethod
    def of(block: Block) -> tuple[DenseBlock, ...]:
        return tuple(DenseBlock(s, part) for s, part in zip(block.slices, block.parts(), strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(piece.where for piece in self.pieces)

    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        return tuple(piece.values for piece in self.pieces)

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return _summed(piece.quad(weights) for piece in self.pieces)

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return _summed(piece.quad_diagonal(weights) for piece in self.pieces)

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        return _summed(mine.cross(theirs, D) for mine, theirs in zip(self.pieces, DenseBlocks.of(other), strict=True))

    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]:
        return tuple(piece.sum_squares()[0] for piece in self.pieces)

    def shifted(self, offset: int) -> DenseBlocks:
        return DenseBlocks(tuple(piece.shifted(offset) for piece in self.pieces))

    def concatenated(self, others: Sequence[Block]) -> DenseBlocks:
        columns = zip(self.pieces, *(DenseBlocks.of(other) for other in others), strict=True)
        return DenseBlocks(tuple(first.concatenated(rest) for first, *rest in columns))

    def single_rows(self) -> DenseBlocks:
        return DenseBlocks(tuple(piece.single_rows() for piece in self.pieces))

    def outputs_at(self, rows: Int[Tensor, " k"]) -> DenseBlocks:
        return DenseBlocks(tuple(piece.outputs_at(rows) for piece in self.pieces))

    def data_at(self, data: slice) -> DenseBlocks:
        return DenseBlocks(tuple(piece.data_at(data) for piece in self.pieces))


@dataclass(frozen=True, eq=False)
class Jacobian(Rows):
    """J (n, c, P) as blocks that tile the parameters; the blocks' order is the same in every Jacobian of a model."""

    blocks: tuple[Block, ...]
    n: int
    c: int
    p: int
    device: torch.device

    def dense(self) -> Float[Tensor, "n c p"]:
        J = torch.zeros(self.n, self.c, self.p, dtype=torch.float64, device=self.device)
        for block in self.blocks:
            for s, part in zip(block.slices, block.parts(), strict=True):
                J[..., s] = part
        return J

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... n c"]:
        return torch.einsum("ncp,...p->...nc", self._dense_once, v)

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return _summed(block.quad(weights) for block in self.blocks)

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return _summed(block.quad_diagonal(weights) for block in self.blocks)

    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        assert isinstance(other, Jacobian)
        # Some data at a time, so that the products of single blocks stay in cache and only the sum is written out.
        step = max(1, _CACHED_FLOATS // (self.c * other.n * other.c))
        pieces = []
        for start in range(0, self.n, step):
            some = (block.data_at(slice(start, start + step)) for block in self.blocks)
            pieces.append(_summed(mine.cross(theirs, D) for mine, theirs in zip(some, other.blocks, strict=True)))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def sum_squares(self) -> Float[Tensor, " p"]:
        total = torch.zeros(self.p, dtype=torch.float64, device=self.device)
        for block in self.blocks:
            for s, squares in zip(block.slices, block.sum_squares(), strict=True):
                total[s] = squares
        return total

    def columns(self, block: slice) -> Jacobian:
        inside = [b for b in self.blocks if all(block.start <= s.start and s.stop <= block.stop for s in b.slices)]
        blocks = tuple(b.shifted(-block.start) for b in inside)
        return replace(self, blocks=blocks, p=block.stop - block.start)

    def concatenated(self, others: Sequence[Rows]) -> Jacobian:
        columns = zip(self.blocks, *(other.blocks for other in others if isinstance(other, Jacobian)), strict=True)
        blocks = tuple(first.concatenated(rest) for first, *rest in columns)
        return replace(self, blocks=blocks, n=self.n + sum(other.n for other in others))

    def single_rows(self) -> Jacobian:
        """The same rows as n · c data with one row each."""
        return replace(self, blocks=tuple(block.single_rows() for block in self.blocks), n=self.n * self.c, c=1)

    def outputs_at(self, rows: Int[Tensor, " k"]) -> Jacobian:
        """Some of the c rows of every datum."""
        return replace(self, blocks=tuple(block.outputs_at(rows) for block in self.blocks), c=len(rows))

    @cached_property
    def _dense_once(self) -> Float[Tensor, "n c p"]:
        return self.dense()


def _shift(s: slice, offset: int) -> slice:
    return slice(s.start + offset, s.stop + offset)


def _summed(terms: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, terms)
