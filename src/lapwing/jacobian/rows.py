"""The Jacobian as a value: blocks of columns that tile the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.jacobian.block import Block, summed
from lapwing.jacobian.dense import DenseBlock
from lapwing.jacobian.factored import FactorBlock
from lapwing.jacobian.output import OutputBlock
from lapwing.operators import Basis, GroupedDiagonal, Rows

_CACHED_FLOATS = 1 << 17  # one megabyte of float64
_WRITTEN_FLOATS = 1 << 24  # of rows written out a few at a time
_CONVERTED_FLOATS = 1 << 19  # of them in double precision
_KEPT_TILES = 2  # of such rows that are not written out again, as sums over positions take long


@dataclass(frozen=True, eq=False)
class Jacobian(Rows):
    """J (n, c, P) as blocks that tile the parameters; the blocks' order is the same in every Jacobian of a model."""

    blocks: tuple[Block, ...]
    n: int
    c: int
    p: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        found = {b.dtype if isinstance(b, FactorBlock | OutputBlock) else torch.float64 for b in self.blocks}
        return found.pop() if len(found) == 1 else torch.float64

    def dense(self) -> Float[Tensor, "n c p"]:
        J = torch.zeros(self.n, self.c, self.p, dtype=torch.float64, device=self.device)
        for block in self.blocks:
            for s, part in zip(block.slices, block.parts(), strict=True):
                J[..., s] = part
        return J

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... n c"]:
        flat = v.reshape(v.shape[:-1].numel(), self.p)
        return summed(block.mv(flat) for block in self.blocks).reshape(*v.shape[:-1], self.n, self.c)

    def push(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... nc"]:
        return torch.cat([v @ rows.T for rows in self._written_out()], dim=-1)

    def pull(self, u: Float[Tensor, "... nc"]) -> Float[Tensor, "... p"]:
        sizes, pieces = self._steps(), self._written_out()
        return summed(some @ rows for some, rows in zip(u.split(sizes, -1), pieces, strict=True))

    def _steps(self) -> list[int]:
        """Rows of so many data at a time as take little memory when they are written out."""
        step = max(1, _WRITTEN_FLOATS // (self.c * self.p))
        return [self.c * min(step, self.n - start) for start in range(0, self.n, step)]

    def _written_out(self) -> Iterator[Float[Tensor, "r p"]]:
        start = 0
        for n_rows in self._steps():
            n = n_rows // self.c
            yield self.data_at(slice(start, start + n)).dense().reshape(n_rows, self.p)
            start += n

    def data_at(self, data: slice) -> Jacobian:
        """All rows of some of the n data."""
        n = len(range(self.n)[data])
        return replace(self, blocks=tuple(block.data_at(data) for block in self.blocks), n=n)

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return summed(torch.cat([some.quad(weights) for some in block.pieces(self.n)]) for block in self.blocks)

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        parts = (torch.cat([some.quad_diagonal(weights) for some in block.pieces(self.n)]) for block in self.blocks)
        return summed(parts)

    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        assert isinstance(other, Jacobian)
        pairs = list(zip(self.blocks, other.blocks, strict=True))
        factored = [pair for pair in pairs if pair[0].meets_as_factors(pair[1], D)]
        terms = [self._cross_written_out(*pair, other.n, D) for pair in pairs if pair not in factored]
        if factored:
            terms.append(self._cross_factored(factored, other, D))
        return summed(terms)

    def own(self, D: GroupedDiagonal) -> Float[Tensor, "n c c"]:
        pieces = (block.pieces(self.n) for block in self.blocks)
        return summed(torch.cat([some.doubled().quad(D.diagonal) for some in each]) for each in pieces)

    def _cross_factored(
        self, pairs: Sequence[tuple[Block, Block]], other: Jacobian, D: GroupedDiagonal
    ) -> Float[Tensor, "nc md"]:
        """Some data at a time, so that the products of single blocks stay in cache and only the sum is written out."""
        step = max(1, _CACHED_FLOATS // (self.c * other.n * other.c))
        pieces = []
        for start in range(0, self.n, step):
            some = slice(start, start + step)
            pieces.append(summed(mine.data_at(some).cross(theirs, D) for mine, theirs in pairs))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _cross_written_out(self, mine: Block, theirs: Block, m: int, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        """Entries of few data of each side at a time; of a symmetric matrix those above the diagonal."""
        size = self.c * sum(s.stop - s.start for s in mine.slices)
        step = max(1, _WRITTEN_FLOATS // max(1, size))
        theirs = mine if mine is theirs else theirs.plain()
        kind = type(mine) if type(mine) is type(theirs) else Block  # in their own order, or both in that of the weights
        weights = kind.written_weights(mine, D)
        n_columns = -(-m // step)
        columns = _tiles_of(theirs, kind, step, kept=n_columns <= _KEPT_TILES)
        rows = columns if mine is theirs else _tiles_of(mine, kind, step, kept=False)
        tiles: list[list[Tensor]] = []
        for i in range(-(-self.n // step)):
            some = rows(i)
            below = [row[i].T for row in tiles] if mine is theirs else []
            tiles.append([*below, *(_in_double(some, weights, columns(j)) for j in range(len(below), n_columns))])
        return torch.cat([torch.cat(row, 1) for row in tiles])

    def sum_squares(self) -> Float[Tensor, " p"]:
        total = torch.zeros(self.p, dtype=torch.float64, device=self.device)
        for block in self.blocks:
            for some in block.pieces(self.n):
                for s, squares in zip(block.slices, some.sum_squares(), strict=True):
                    total[s] += squares
        return total

    def rotated(self, basis: Basis) -> Jacobian:
        (block,) = self.blocks
        assert isinstance(block, FactorBlock | OutputBlock)
        U_B, U_A = basis.at(block.dtype)
        return replace(self, blocks=(block.rotated(U_B, U_A),), p=len(U_B) * U_B.shape[1] * U_A.shape[1])

    def pieces(self) -> Iterator[Jacobian]:
        (block,) = self.blocks
        parts = block.pieces(self.n)
        step = -(-self.n // len(parts))
        for number, part in enumerate(parts):
            yield replace(self, blocks=(part,), n=min(step, self.n - number * step))

    def columns(self, block: slice) -> Jacobian:
        inside = (b.within(block) for b in self.blocks)
        blocks = tuple(b.shifted(-block.start) for b in inside if b is not None)
        return replace(self, blocks=blocks, p=block.stop - block.start)

    def selected(self, selection: Int[Tensor, " k"]) -> Jacobian:
        """Some of the columns, ascending; of each layer only these are formed."""
        blocks: list[Block] = []
        for block in self.blocks:
            for tensor in block.slices:
                bounds = torch.tensor([tensor.start, tensor.stop], device=selection.device)
                where = slice(*torch.searchsorted(selection, bounds).tolist())
                if where.stop > where.start:
                    blocks.append(DenseBlock(where, block.entries(tensor, selection[where] - tensor.start)))
        nothing = DenseBlock(slice(0, 0), torch.zeros(self.n, self.c, 0, device=self.device))
        return replace(self, blocks=tuple(blocks) or (nothing,), p=len(selection))

    def kept(self) -> Jacobian:
        """The same rows, each block in the form that takes least memory."""
        return replace(self, blocks=tuple(block.kept() for block in self.blocks))

    def formed(self) -> Jacobian:
        """The same rows, for another process."""
        return replace(self, blocks=tuple(block.formed() for block in self.blocks))

    def concatenated(self, others: Sequence[Rows]) -> Jacobian:
        columns = zip(self.blocks, *(other.blocks for other in others if isinstance(other, Jacobian)), strict=True)
        blocks = tuple(first.concatenated(rest) for first, *rest in columns)
        return replace(self, blocks=blocks, n=self.n + sum(other.n for other in others))

    def single_rows(self) -> Jacobian:
        return replace(self, blocks=tuple(block.single_rows() for block in self.blocks), n=self.n * self.c, c=1)

    def outputs_at(self, rows: Int[Tensor, " k"]) -> Jacobian:
        """Some of the c rows of every datum."""
        return replace(self, blocks=tuple(block.outputs_at(rows) for block in self.blocks), c=len(rows))


def _tiles_of(block: Block, kind: type[Block], step: int, *, kept: bool) -> Callable[[int], Tensor]:
    """Entries of the j-th `step` data."""

    def tile(j: int) -> Tensor:
        return kind.written(block.data_at(slice(j * step, (j + 1) * step)))

    return cache(tile) if kept else tile


def _in_double(x: Float[Tensor, "n k"], weights: Float[Tensor, " k"], y: Float[Tensor, "m k"]) -> Float[Tensor, "n m"]:
    """x diag(w) yᵀ in float64; some columns at a time, so that what is converted stays in the processor's cache."""
    step = max(1, _CONVERTED_FLOATS // max(len(x), len(y), 1))
    parts = zip(x.split(step, 1), weights.split(step), y.split(step, 1), strict=True)
    return summed((a.double() * w) @ b.double().T for a, w, b in parts)
