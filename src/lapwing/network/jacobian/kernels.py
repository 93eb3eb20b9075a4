"""Kernels J D J'ᵀ between all rows of two Jacobians, accumulated in place layer by layer.

For layers with many positions the dense rows Σ_t g_t a_tᵀ are formed for some data at a time, and multiplied a few
thousand columns at a time, in float64 or in the dtype of the rows (`KernelDtype`). Sums over columns are in float64 in
both cases. If both sides are the same rows, only the upper triangle is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import torch

from lapwing._types import Float, Tensor
from lapwing.network.jacobian.block import Block
from lapwing.network.jacobian.factored import FactorBlock
from lapwing.network.jacobian.sparse import SparseBlock
from lapwing.operators import GroupedDiagonal

_CACHED_FLOATS = 1 << 17  # entries that stay in the processor's cache: 1 MiB of float64
_WRITTEN_FLOATS = 1 << 26  # entries of dense rows of one side formed at a time
_EVEN = 64  # products with a multiple of 64 rows are an eighth faster
_ROWS, _COLUMNS = 512, 8192  # size of one product; longer sums in float32 would lose accuracy

Pair = tuple[Block, Block]


class KernelDtype(Enum):
    """Dtype in which products of entries are computed."""

    DOUBLE = "float64"
    KEPT = "as the rows are kept, float32 at least"

    def dtype(self, *kept: torch.dtype) -> torch.dtype:
        if self is KernelDtype.DOUBLE:
            return torch.float64
        found = torch.float32
        for dtype in kept:
            found = torch.promote_types(found, dtype)
        return found


def add_crossed_(
    totals: Sequence[Float[Tensor, "_ _"]], pairs: Sequence[Pair], D: GroupedDiagonal, products: KernelDtype
) -> None:
    """totals[c] ← totals[c] + J_c D J'_cᵀ for one layer and several pairs of rows."""
    mine, theirs = pairs[0]
    if isinstance(mine, FactorBlock) and all(m.has_factored_cross(t, D) for m, t in pairs):
        _add_factored_(totals, pairs, D)
    elif mine.has_factored_cross(theirs, D):
        for total, pair in zip(totals, pairs, strict=True):
            _add_some_at_a_time_(total, *pair, D)
    else:
        no_squares = [torch.empty(0)] * len(totals)
        _add_all_dense_(totals, no_squares, pairs, D, products)


def add_crossed_and_squared_(
    totals: Sequence[Float[Tensor, "n m"]],
    squares: Sequence[Float[Tensor, " m"]],
    pairs: Sequence[Pair],
    D: GroupedDiagonal,
    products: KernelDtype,
) -> None:
    """The same for single rows, and squares[c] ← squares[c] + diag(J'_c D J'_cᵀ) from the same dense rows."""
    if not pairs[0][0].has_factored_cross(pairs[0][1], D):
        _add_all_dense_(totals, squares, pairs, D, products)
        return
    add_crossed_(totals, pairs, D, products)
    for square, (_, theirs) in zip(squares, pairs, strict=True):
        square += torch.cat([b.doubled().quad_diagonal(D.diagonal)[:, 0] for b in theirs.pieces(len(square))])


def _add_all_dense_(
    totals: Sequence[Tensor],
    squares: Sequence[Tensor],
    pairs: Sequence[Pair],
    D: GroupedDiagonal,
    products: KernelDtype,
) -> None:
    for total, square, pair in zip(totals, squares, pairs, strict=True):
        _add_dense_(total, square, *pair, D, products)


def _add_factored_(totals: Sequence[Tensor], pairs: Sequence[Pair], D: GroupedDiagonal) -> None:
    """(g·g')(Σ_i d_i a_i a'_i): two small Gram matrices; outputs with the same inputs share the second one."""
    of: tuple[object, object] = None, None
    inputs = torch.empty(0)
    for total, (mine, theirs) in zip(totals, pairs, strict=True):
        theirs = mine if theirs is mine else theirs.plain()
        assert isinstance(mine, FactorBlock) and isinstance(theirs, FactorBlock)
        if of[0] is not mine.inputs or of[1] is not theirs.inputs:
            inputs, of = mine.input_products(theirs, D), (mine.inputs, theirs.inputs)
        _add_times_(total, mine, theirs, inputs)


def _add_times_(total: Tensor, mine: FactorBlock, theirs: FactorBlock, inputs: Float[Tensor, "n m"]) -> None:
    """total ← total + (g gᵀ) ∘ inputs, a few rows at a time, so that products stay in the processor's cache."""
    (n, c), (m, d) = mine.g.shape[:2], theirs.g.shape[:2]
    g = mine.g[:, :, 0, 0].flatten(0, 1).double()
    h = g if theirs is mine else theirs.g[:, :, 0, 0].flatten(0, 1).double()
    step = max(1, _CACHED_FLOATS // max(1, c * m * d))
    for start in range(0, n, step):
        stop = min(n, start + step)
        first = start if theirs is mine else 0
        outputs = (g[start * c : stop * c] @ h[first * d :].T).view(stop - start, c, m - first, d)
        products = outputs * inputs[start:stop, None, first:, None]
        total[start * c : stop * c, first * d :] += products.flatten(2).flatten(0, 1)


def _add_some_at_a_time_(total: Tensor, mine: Block, theirs: Block, D: GroupedDiagonal) -> None:
    n, m = total.shape
    step = max(1, _CACHED_FLOATS // max(1, m * mine.c))
    for start in range(0, n // mine.c, step):
        total[start * mine.c : (start + step) * mine.c] += mine.data_at(slice(start, start + step)).cross(theirs, D)


def _add_dense_(
    total: Tensor,
    square: Tensor,  # one entry per row of theirs, or empty
    mine: Block,
    theirs: Block,
    D: GroupedDiagonal,
    products: KernelDtype,
) -> None:
    for x, y, weights in _parts(mine, theirs, D):
        if weights.ndim == 0 and not weights.requires_grad and not weights:
            continue  # columns of another prior group: D is zero on them
        dtype = products.dtype(x.dtype, y.dtype)
        (n, m), step = (len(total) // x.c, total.shape[1] // y.c), _data_at_once(y)
        for column in range(0, m, step):
            Y = y.data_at(slice(column, column + step)).dense_rows()
            if len(square):
                square[column : column + len(Y)] += _squares(Y, weights)
            rows = range(0, column + 1, step) if x is y else range(0, n, min(step, _ROWS))
            for row in rows:
                same = x is y and row == column
                X = Y if same else x.data_at(slice(row, row + rows.step)).dense_rows()
                at = slice(row * x.c, row * x.c + len(X)), slice(column * y.c, column * y.c + len(Y))
                total[at] += _product(X, Y, weights, dtype)


def _squares(X: Float[Tensor, "r k"], weights: Float[Tensor, "*k"]) -> Float[Tensor, " r"]:
    roots = weights.sqrt().to(X.dtype).expand(X.shape[1]).split(_COLUMNS) if weights.ndim else None
    parts = X.split(_COLUMNS, 1)
    scaled = parts if roots is None else [part * root for part, root in zip(parts, roots, strict=True)]
    total = torch.stack([torch.linalg.vector_norm(part, dim=1).double() for part in scaled]).square().sum(0)
    return total if weights.ndim else total * weights


def _parts(mine: Block, theirs: Block, D: GroupedDiagonal) -> Iterator[tuple[Block, Block, Tensor]]:
    """Both sides with columns in the same order, and D: one number if it is constant there, else one per column."""
    same, factors = mine is theirs, (FactorBlock, SparseBlock)
    if type(mine) is not type(theirs) and not (isinstance(mine, factors) and isinstance(theirs, factors)):
        mine, theirs = mine.plain().entered(), theirs.plain().entered()
    for where in mine.slices:
        value = D.constant_on(where)
        x, y = (block.within(where) for block in (mine, theirs))
        assert x is not None and y is not None
        quick = x.in_fastest_order(), y.in_fastest_order()
        if value is not None and _by_channel(quick[0]) == _by_channel(quick[1]):
            x, y = quick
        yield x, x if same else y, x.ordered_weights(D) if value is None else value


def _by_channel(block: Block) -> bool:
    return block.inputs.by_channel if isinstance(block, FactorBlock | SparseBlock) else True


def _data_at_once(block: Block) -> int:
    n = max(1, _WRITTEN_FLOATS // max(1, block.c * sum(s.stop - s.start for s in block.slices)))
    return n - n % _EVEN if n > _EVEN else n


def _product(
    X: Float[Tensor, "r k"], Y: Float[Tensor, "s k"], weights: Float[Tensor, "*k"], dtype: torch.dtype
) -> Float[Tensor, "r s"]:
    """X diag(w) Yᵀ: products of `_COLUMNS` columns in `dtype`, summed in float64.

    If Y is X, at least the upper triangle is computed.
    """
    total = torch.zeros(len(X), len(Y), dtype=torch.float64, device=X.device)
    for first in range(0, X.shape[1], _COLUMNS):
        some = slice(first, first + _COLUMNS)
        x = X[:, some].to(dtype)
        y = x if Y is X else Y[:, some].to(dtype)
        weighted = x * weights[some].to(dtype) if weights.ndim else x
        step = _ROWS // 2 if Y is X else len(X)
        for start in range(0, len(X), step):
            rows = slice(start, start + step)
            left = slice(start if Y is X else 0, None)
            total[rows, left] += weighted[rows] @ y[left].T
    return total if weights.ndim else total * weights
