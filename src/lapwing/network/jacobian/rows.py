"""The Jacobian of a batch, as blocks of columns that partition the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.linalg import mirror_, recomputed
from lapwing.network.jacobian.block import Block, summed
from lapwing.network.jacobian.dense import DenseBlock
from lapwing.network.jacobian.factored import FactorBlock
from lapwing.network.jacobian.kernels import KernelDtype, add_crossed_, add_crossed_and_squared_
from lapwing.network.jacobian.output import OutputBlock
from lapwing.network.jacobian.sparse import SparseBlock
from lapwing.operators import Basis, GroupedDiagonal, Rows, axes

_WRITTEN_FLOATS = 1 << 24  # entries of dense rows formed at a time
_ROUNDING = {KernelDtype.DOUBLE: 2.0**-53, KernelDtype.KEPT: 2.0**-24}


@dataclass(frozen=True, eq=False)
class Jacobian(Rows):
    """J (n, c, P) as blocks that partition the parameters, in the same order for every batch of a model."""

    blocks: tuple[Block, ...]
    n: int
    c: int
    p: int
    device: torch.device
    products: KernelDtype = KernelDtype.DOUBLE  # dtype of the products in `cross` and `own`

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
        """Numbers of rows of the pieces in which dense rows are formed."""
        step = max(1, _WRITTEN_FLOATS // (self.c * self.p))
        return [self.c * min(step, self.n - start) for start in range(0, self.n, step)]

    def _written_out(self) -> Iterator[Float[Tensor, "r p"]]:
        start = 0
        for n_rows in self._steps():
            n = n_rows // self.c
            yield self.data_at(slice(start, start + n)).dense().reshape(n_rows, self.p)
            start += n

    def data_at(self, data: slice) -> Jacobian:
        """All rows of a subset of the n data."""
        n = len(range(self.n)[data])
        return replace(self, blocks=tuple(block.data_at(data) for block in self.blocks), n=n)

    @property
    def attached(self) -> bool:
        return any(block.attached for block in self.blocks)

    def fresh(self) -> Jacobian:
        return replace(self, blocks=tuple(block.fresh() for block in self.blocks)) if self.attached else self

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return self._each(lambda some: some.quad(weights))

    def quads(self, weights: Float[Tensor, "s p"]) -> Float[Tensor, "s n c c"]:
        parts = (torch.cat([some.quads(weights) for some in block.pieces(self.n)], 1) for block in self.blocks)
        return summed(parts)

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return self._each(lambda some: some.quad_diagonal(weights))

    def _each(self, contract: Callable[[Block], Tensor]) -> Tensor:
        """Σ over blocks of a contraction, in pieces of the data."""

        def contracted(some: Block) -> Tensor:
            if not some.attached:
                return contract(some)
            floats = self.n * self.c * sum(s.stop - s.start for s in some.slices)
            return recomputed(lambda: contract(some.fresh()), attached=True, floats=floats)

        return summed(torch.cat([contracted(some) for some in block.pieces(self.n)]) for block in self.blocks)

    def cross(self, other: Rows, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        return self.cross_each([self], [other], D)[0]

    @classmethod
    def cross_each(
        cls, mine: Sequence[Rows], theirs: Sequence[Rows], D: GroupedDiagonal
    ) -> list[Float[Tensor, "nc md"]]:
        pairs, products = _paired(mine, theirs)
        totals = [torch.zeros(J.n * J.c, K.n * K.c, dtype=torch.float64, device=J.device) for J, K in pairs]
        for layer in _layers(pairs):
            add_crossed_(totals, layer, D, products)
        return [mirror_(total) if J.blocks is K.blocks else total for (J, K), total in zip(pairs, totals, strict=True)]

    @classmethod
    def cross_and_own_each(
        cls, mine: Sequence[Rows], theirs: Sequence[Rows], D: GroupedDiagonal
    ) -> tuple[list[Float[Tensor, "nc md"]], list[Float[Tensor, "m d d"]]]:
        pairs, products = _paired(mine, theirs)
        if products is KernelDtype.DOUBLE or any(J.blocks is K.blocks or K.c > 1 for J, K in pairs):
            return super().cross_and_own_each(mine, theirs, D)
        totals = [torch.zeros(J.n * J.c, K.n, dtype=torch.float64, device=J.device) for J, K in pairs]
        squares = [total.new_zeros(total.shape[1]) for total in totals]
        for layer in _layers(pairs):
            add_crossed_and_squared_(totals, squares, layer, D, products)
        return totals, [square[:, None, None] for square in squares]

    def quick(self) -> Jacobian:
        exact = all(block.dtype == torch.float64 for block in self.blocks)
        return self if exact else replace(self, products=KernelDtype.KEPT)

    @property
    def rounding(self) -> float:
        return _ROUNDING[self.products]

    def own(self, D: GroupedDiagonal) -> Float[Tensor, "n c c"]:
        pieces = (block.pieces(self.n) for block in self.blocks)
        return summed(torch.cat([some.doubled().quad(D.diagonal) for some in each]) for each in pieces)

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
        return replace(self, blocks=(block.rotated(U_B, U_A),), p=len(U_B) * axes.width(U_B) * axes.width(U_A))

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
        """A subset of the columns, in ascending order, as dense blocks; other columns are not formed."""
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
        """The same rows, each block in the form that takes the least memory."""
        blocks = (block.kept() for block in self.blocks)
        # A gradient that is zero at these inputs may have a nonzero derivative: do not drop zeros from a graph.
        thin = (SparseBlock.of(b) if isinstance(b, FactorBlock) and not b.attached else b for b in blocks)
        return replace(self, blocks=tuple(thin))

    def formed(self) -> Jacobian:
        """The same rows with all lazy parts computed, to be sent to another process."""
        return replace(self, blocks=tuple(block.formed() for block in self.blocks))

    def concatenated(self, others: Sequence[Rows]) -> Jacobian:
        columns = zip(self.blocks, *(other.blocks for other in others if isinstance(other, Jacobian)), strict=True)
        blocks = tuple(first.concatenated(rest) for first, *rest in columns)
        return replace(self, blocks=blocks, n=self.n + sum(other.n for other in others))

    def single_rows(self) -> Jacobian:
        return replace(self, blocks=tuple(block.single_rows() for block in self.blocks), n=self.n * self.c, c=1)

    def outputs_at(self, rows: Int[Tensor, " k"]) -> Jacobian:
        """A subset of the c rows of every datum."""
        return replace(self, blocks=tuple(block.outputs_at(rows) for block in self.blocks), c=len(rows))


def _paired(mine: Sequence[Rows], theirs: Sequence[Rows]) -> tuple[list[tuple[Jacobian, Jacobian]], KernelDtype]:
    pairs = []
    for J, K in zip(mine, theirs, strict=True):
        assert isinstance(J, Jacobian) and isinstance(K, Jacobian)
        pairs.append((J, K))
    kept = all(J.products is K.products is KernelDtype.KEPT for J, K in pairs)
    return pairs, KernelDtype.KEPT if kept else KernelDtype.DOUBLE


def _layers(pairs: Sequence[tuple[Jacobian, Jacobian]]) -> Iterator[tuple[tuple[Block, Block], ...]]:
    """The blocks of all pairs, layer by layer."""
    # Kernels test `mine is theirs` to compute only a triangle. Two Jacobians may share single blocks without being the
    # same rows, so copy (shallowly) such blocks.
    columns = []
    for J, K in pairs:
        apart = J.blocks is not K.blocks
        blocks = zip(J.blocks, K.blocks, strict=True)
        columns.append([(mine, copy(theirs) if apart and mine is theirs else theirs) for mine, theirs in blocks])
    return zip(*columns, strict=True)
