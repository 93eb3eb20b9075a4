"""The Jacobian as a value: one block per layer or parameter tensor, factored where the layer allows it.

A layer that computes s_t = W a_t at positions t has ∂f_c/∂W = Σ_t g_ct a_tᵀ with g = ∂f_c/∂s_t. The factors (a, g) are
the whole block; contractions work on them and nothing of size n · c · P is formed. A bias is a column of W whose input
is 1. Blocks without factors are dense. Factors keep the model's dtype; sums over them come out in float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.operators import Arrangement, Basis, GroupedDiagonal, Rows

_CACHED_FLOATS = 1 << 17  # one megabyte of float64


@dataclass(frozen=True)
class RowSizes:
    """Numbers one row of J takes: as factors of all layers, dense in its largest layer, and dense throughout."""

    factored: int
    widest: int
    dense: int

    @classmethod
    def of(cls, blocks: Sequence[Block], p: int) -> RowSizes:
        return cls(sum(b.row_floats for b in blocks), max((b.contracted_floats for b in blocks), default=0), p)


class Block(ABC):
    """The columns of J that belong to some parameter tensors; (n, c) rows."""

    @property
    @abstractmethod
    def slices(self) -> tuple[slice, ...]:
        """Where these columns stand among the P parameters, in the order of `parts`."""

    @abstractmethod
    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        """The dense columns, one array per slice, float64."""

    @property
    def row_floats(self) -> int:
        """Numbers that one row takes as it is kept."""
        return sum(s.stop - s.start for s in self.slices)

    @property
    def contracted_floats(self) -> int:
        """Numbers that one row takes, besides, while it is contracted."""
        return sum(s.stop - s.start for s in self.slices)

    @abstractmethod
    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        """J v for some vectors."""

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
        return (self.values.double(),)

    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        return torch.einsum("nck,sk->snc", self.values.double(), v[:, self.where])

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return ((self.values * weights[self.where].to(self.values.dtype)) @ self.values.mT).double()

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return (self.values**2 @ weights[self.where].to(self.values.dtype)).double()

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        (values,) = other.parts()
        return (self.values.double().flatten(0, 1) * D.diagonal[self.where]) @ values.flatten(0, 1).T

    def sum_squares(self) -> tuple[Float[Tensor, " k"], ...]:
        return ((self.values.double() ** 2).sum((0, 1)),)

    def shifted(self, offset: int) -> DenseBlock:
        return replace(self, where=slice(self.where.start + offset, self.where.stop + offset))

    def concatenated(self, others: Sequence[Block]) -> DenseBlock:
        return replace(self, values=torch.cat([self.values, *(other.parts()[0].to(self.values) for other in others)]))

    def single_rows(self) -> DenseBlock:
        return replace(self, values=self.values.flatten(0, 1)[:, None])

    def outputs_at(self, rows: Int[Tensor, " k"]) -> DenseBlock:
        return replace(self, values=self.values[:, rows])

    def data_at(self, data: slice) -> DenseBlock:
        return replace(self, values=self.values[data])


@dataclass(frozen=True, eq=False)
class FactorBlock(Block):
    """A layer's columns as factors: inputs a (n, r, q, i) and output gradients g (n, c, r, q, o) of q parallel maps.

    The inputs are computed when first needed: a convolution's patches are much larger than its input, and
    accumulating the output factor alone never looks at them.
    """

    arrangement: Arrangement
    g: Float[Tensor, "n c r q o"]
    inputs: Callable[[], Float[Tensor, "n r q i"]]

    @cached_property
    def a(self) -> Float[Tensor, "n r q i"]:
        return self.inputs()

    @property
    def slices(self) -> tuple[slice, ...]:
        return self.arrangement.slices

    @property
    def row_floats(self) -> int:
        return prod(self.g.shape[2:])

    @property
    def contracted_floats(self) -> int:
        inputs = prod(self.a.shape[1:])
        return inputs if self.one_position else inputs + super().contracted_floats

    @property
    def one_position(self) -> bool:
        return self.g.shape[2] == 1

    def matrices(self) -> Float[Tensor, "n c q o i"]:
        """Σ_t g_t a_tᵀ, in the model's dtype."""
        n, c, r, q, o = self.g.shape
        g = self.g.permute(0, 3, 1, 4, 2).reshape(n, q, c * o, r)
        product = g @ self.a.permute(0, 2, 1, 3)
        return product.reshape(n, q, c, o, -1).transpose(1, 2)

    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        exact = replace(self, g=self.g.double(), inputs=self.a.double)
        return self.arrangement.flat_parts(exact.matrices())

    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        # Σ_t g_tᵀ V a_t: the change of the layer's outputs, then of f
        V = self.arrangement.matrices(v.to(self.g.dtype))
        changes = torch.einsum("nrqi,sqoi->snrqo", self.a, V)
        return torch.einsum("ncrqo,snrqo->snc", self.g, changes).double()

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        W = self.arrangement.matrices(weights).to(self.g.dtype)
        if self.one_position:
            # Σ_oi g_co g_do a_i² w_oi = Σ_o g_co g_do (W a²)_o
            g = self.g[:, :, 0].flatten(2)
            return ((g * self._squared_inputs_through(W)[:, None]) @ g.mT).double()
        M = self.matrices().flatten(2)
        M = M * W.flatten().sqrt() if W.requires_grad else M.mul_(W.flatten().sqrt())  # M is nobody else's
        return (M @ M.mT).double()

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        W = self.arrangement.matrices(weights).to(self.g.dtype)
        if self.one_position:
            return (self.g[:, :, 0].flatten(2) ** 2 @ self._squared_inputs_through(W)[:, :, None])[..., 0].double()
        return (self.matrices().flatten(2) ** 2 @ W.flatten()).double()

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        scales = self.arrangement.input_scales(D)
        if not isinstance(other, FactorBlock) or not (self._single and other._single) or scales is None:
            dense = zip(self.slices, self.parts(), other.parts(), strict=True)
            return _summed((J.flatten(0, 1) * D.diagonal[s]) @ K.flatten(0, 1).T for s, J, K in dense)
        # (g·g')(Σ_i d_i a_i a'_i): two small Gram matrices instead of one over all weights
        inputs = (self.a[:, 0, 0].double() * scales) @ other.a[:, 0, 0].double().T
        outputs = self.g[:, :, 0, 0].flatten(0, 1).double() @ other.g[:, :, 0, 0].flatten(0, 1).double().T
        if self.g.shape[1] == other.g.shape[1] == 1:
            return outputs * inputs
        shape = (self.g.shape[0], self.g.shape[1], other.g.shape[0], other.g.shape[1])
        return (outputs.view(shape) * inputs[:, None, :, None]).view_as(outputs)

    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]:
        if self.one_position:
            squares = torch.einsum("nqo,nqi->qoi", (self.g[:, :, 0] ** 2).sum(1), self.a[:, 0] ** 2)
        else:
            # One output at a time: positions add up before squaring, so a data × weights array is needed, not more.
            each = (replace(self, g=self.g[:, [c]], inputs=lambda: self.a) for c in range(self.g.shape[1]))
            squares = _summed(block.matrices().square_().sum((0, 1)) for block in each)
        return self.arrangement.flat_parts(squares.double())

    def rotated(self, U_B: Float[Tensor, "q o o"], U_A: Float[Tensor, "q i i"]) -> Block:
        """The rows in other coordinates: W ↦ U_Bᵀ W U_A, flattened as (q, o, i)."""
        q, o, i = len(U_B), U_B.shape[1], U_A.shape[1]
        c, r = self.g.shape[1:3]
        # Rotating the factors costs r (i² + c o²) per datum, rotating their products c (o² i + o i²).
        if not self.one_position and c * (o * o * i + o * i * i) < r * (i * i + c * o * o):
            turned = U_B.mT @ self.matrices() @ U_A
            return DenseBlock(slice(0, q * o * i), turned.flatten(2))
        g = torch.einsum("ncrqo,qop->ncrqp", self.g, U_B)
        a = torch.einsum("nrqi,qij->nrqj", self.a, U_A)
        return FactorBlock(Arrangement.plain(q, o, i), g, lambda: a)

    def within(self, where: slice) -> Block | None:
        weight, bias = (
            s is not None and where.start <= s.start and s.stop <= where.stop
            for s in (self.arrangement.weight, self.arrangement.bias)
        )
        if (weight + bias) in (0, len(self.slices)):
            return self if weight or bias else None
        kept = replace(self.arrangement, bias=None) if weight else replace(self.arrangement, weight=None)
        columns = slice(None, -1) if weight else slice(-1, None)
        return replace(self, arrangement=kept, inputs=lambda: self.a[..., columns])

    def shifted(self, offset: int) -> FactorBlock:
        return replace(self, arrangement=self.arrangement.shifted(offset))

    def concatenated(self, others: Sequence[Block]) -> FactorBlock:
        blocks = [self, *(other for other in others if isinstance(other, FactorBlock))]
        r = max(block.g.shape[2] for block in blocks)  # shorter sequences get positions that contribute nothing
        g = torch.cat([padded(block.g, r, 2) for block in blocks])
        return replace(self, g=g, inputs=lambda: torch.cat([padded(block.a, r, 1) for block in blocks]))

    def single_rows(self) -> FactorBlock:
        c = self.g.shape[1]
        return replace(self, g=self.g.flatten(0, 1)[:, None], inputs=lambda: self.a.repeat_interleave(c, 0))

    def outputs_at(self, rows: Int[Tensor, " k"]) -> FactorBlock:
        return replace(self, g=self.g[:, rows], inputs=lambda: self.a)

    def data_at(self, data: slice) -> FactorBlock:
        return replace(self, g=self.g[data], inputs=lambda: self.a[data])

    @property
    def _single(self) -> bool:
        return self.one_position and self.g.shape[3] == 1

    def _squared_inputs_through(self, W: Float[Tensor, "q o i"]) -> Float[Tensor, "n qo"]:
        return torch.einsum("nqi,qoi->nqo", self.a[:, 0] ** 2, W).flatten(1)


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
        flat = v.reshape(-1, self.p)
        return _summed(block.mv(flat) for block in self.blocks).reshape(*v.shape[:-1], self.n, self.c)

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

    def rotated(self, basis: Basis) -> Jacobian:
        (block,) = self.blocks
        assert isinstance(block, FactorBlock)
        U_B, U_A = basis.at(block.g.dtype)
        return replace(self, blocks=(block.rotated(U_B, U_A),), p=len(U_B) * U_B.shape[1] * U_A.shape[1])

    def columns(self, block: slice) -> Jacobian:
        inside = (b.within(block) for b in self.blocks)
        blocks = tuple(b.shifted(-block.start) for b in inside if b is not None)
        return replace(self, blocks=blocks, p=block.stop - block.start)

    def concatenated(self, others: Sequence[Rows]) -> Jacobian:
        columns = zip(self.blocks, *(other.blocks for other in others if isinstance(other, Jacobian)), strict=True)
        blocks = tuple(first.concatenated(rest) for first, *rest in columns)
        return replace(self, blocks=blocks, n=self.n + sum(other.n for other in others))

    def single_rows(self) -> Jacobian:
        return replace(self, blocks=tuple(block.single_rows() for block in self.blocks), n=self.n * self.c, c=1)

    def outputs_at(self, rows: Int[Tensor, " k"]) -> Jacobian:
        """Some of the c rows of every datum."""
        return replace(self, blocks=tuple(block.outputs_at(rows) for block in self.blocks), c=len(rows))


def padded(tensor: Tensor, r: int, axis: int) -> Tensor:
    """Zeros behind the entries of an axis until there are r."""
    missing = r - tensor.shape[axis]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def _summed(terms: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, terms)
