"""Running sums Σ x yᵀ over many rows: matrix products in the dtype of the rows, long sums in float64.

ProductSum accumulate in place (`baddbmm_`, `addmm_`): a batch costs one matrix multiplication, and no array of all rows
is stored. Float32 products over at most `_MOST_ROWS` rows are then added to a float64 total, which bounds rounding.
"""

from __future__ import annotations

import torch

from lapwing._types import Float, State, Tensor
from lapwing.linalg.symmetric import BLOCK, mirror_

_MOST_ROWS = 4096  # rows summed in their own dtype before they are added to the float64 total
_FEWEST_ROWS = 64  # rows per multiplication; smaller batches are buffered first
_CONVERTED = 1 << 15  # entries converted to another dtype at a time, so that they stay in the cache
_ALIGNED = 16  # entries: output rows that start at multiples of 16 are written a third faster
FLOAT32_SIDE = 512  # side of the matrix from which sums of float32 rows stay in float32


class ProductSum:
    """A running sum Σ_m x_m y_mᵀ of rows x (m, q, d) and y (m, q, e), for each of q maps: (q, d, e).

    The caller adds the sum to a float64 total (`take`) once `full`.
    """

    def __init__(self) -> None:
        self.buffers = _RowBuffer(), _RowBuffer()
        self.part: Tensor | None = None
        self.n = 0

    @property
    def full(self) -> bool:
        return self.n >= _MOST_ROWS

    def add(self, x: Float[Tensor, "m q d"], y: Float[Tensor, "m q e"], *, ones: bool = False) -> None:
        """Add rows. With `ones`, a column of ones (the bias input) is appended to y without copying y."""
        x, y = at_least_float32(x), at_least_float32(y)
        left, right = self.buffers[0].ready(x), self.buffers[1].ready(y, ones=ones)
        if left is not None and right is not None:
            self._multiply(left, right, ones=ones and right is y)

    def take(self) -> Float[Tensor, "q d e"] | None:
        """The sum since the last `take`, None if no rows came. The next `add` overwrites it: use it before."""
        left, right = self.buffers[0].flush(), self.buffers[1].flush()
        if left is not None and right is not None:
            self._multiply(left, right)
        empty, self.n = self.n == 0, 0
        return None if empty else self.part

    def state(self) -> State:
        return {"few": [buffer.state() for buffer in self.buffers], "part": self.part if self.n else None, "n": self.n}

    def restore(self, state: State) -> None:
        for buffer, kept in zip(self.buffers, state["few"], strict=True):
            buffer.restore(kept)
        self.part, self.n = state["part"], state["n"]

    def _multiply(self, x: Float[Tensor, "m q d"], y: Float[Tensor, "m q e"], *, ones: bool = False) -> None:
        e, beta = y.shape[2], float(self.n > 0)  # β = 0 overwrites the sum that was taken, NaN included
        if self.part is None:
            self.part = _aligned(x, x.shape[1], x.shape[2], e + ones)
        self.part[..., :e].baddbmm_(x.permute(1, 2, 0), y.transpose(0, 1), beta=beta)
        if ones:
            _add_(self.part[..., e], x.sum(0), beta)
        self.n += len(x)


def stored_dtype(side: int, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a sum of outer products (side, side) of rows of this dtype: float32 if it is large and the rows are
    not float64, else float64."""
    return torch.float32 if side >= FLOAT32_SIDE and dtype != torch.float64 else torch.float64


class GramSum:
    """Gram matrix Σ_m x_m x_mᵀ of rows x (m, q, d), for each of q maps: (q, d, d).

    Only the upper block triangle is computed; `result` mirrors it. Large sums of float32 rows (`stored_dtype`) stay in
    float32, which takes a third of the memory of a float64 sum with a float32 buffer. `exact` forces float64.
    """

    def __init__(self, q: int, d: int, device: torch.device, *, exact: bool = False) -> None:
        self.shape, self.device, self.exact = (q, d, d), device, exact
        self.H: Tensor | None = None  # the float64 total, allocated when first needed
        self.buffer = _RowBuffer()
        self.part: Tensor | None = None  # the sum of the last n rows, not yet in H, in their own dtype
        self.n = 0

    def add(self, x: Float[Tensor, "m q d"], *, ones: bool = False) -> None:
        """Add rows. With `ones`, a column of ones (the bias input) is appended to x without copying x."""
        x = at_least_float32(x)
        rows = self.buffer.ready(x, ones=ones)
        if rows is not None:
            self._multiply(rows, ones=ones and rows is x)
        if self.n >= _MOST_ROWS and self.part is not None and not self._single(self.part):
            self._fold()

    def add_product(self, product: Float[Tensor, "q d d"]) -> None:
        """Add a sum Σ x xᵀ that was computed elsewhere."""
        self._sum(product).add_(product)

    def add_transposed(self, x: Float[Tensor, "m d r"]) -> None:
        """Add Σ_m x_m x_mᵀ for one map, x_m (d, r) with the vectors as columns: avoids a transposed copy."""
        x = at_least_float32(x)
        if self._single(x):
            self._sum(x)[0].addbmm_(x, x.mT)
        else:
            self._sum(x)[0].add_(x.new_zeros(x.shape[1], x.shape[1]).addbmm_(x, x.mT))

    @property
    def empty(self) -> bool:
        return self.H is None and not self.n and not self.buffer.n

    def result(self) -> Float[Tensor, "q d d"]:
        """The Gram matrices, both triangles filled."""
        rows = self.buffer.flush()
        if rows is not None:
            self._multiply(rows)
        if self.part is not None and self._single(self.part):
            total = self._sum(self.part)
        else:
            self._fold()
            total = self._sum(torch.empty(0, dtype=torch.float64))
        for H in total:
            mirror_(H)
        return total

    def state(self) -> State:
        return {"H": self.H, "few": self.buffer.state(), "part": self.part if self.n else None, "n": self.n}

    def restore(self, state: State) -> None:
        self.H, self.part, self.n = state["H"], state["part"], state["n"]
        self.buffer.restore(state["few"])

    def _multiply(self, x: Float[Tensor, "m q d"], *, ones: bool = False) -> None:
        """part ← β part + Σ x xᵀ; for one large map in strips of `BLOCK` rows right of the diagonal."""
        d, beta = x.shape[2], float(self.n > 0)
        if self.part is None:
            self.part = _aligned(x, *self.shape)
        if x.shape[1] > 1 or d < 2 * BLOCK:
            self.part[:, :d, :d].baddbmm_(x.permute(1, 2, 0), x.transpose(0, 1), beta=beta)
        else:
            M = x[:, 0]
            strips = zip(range(0, d, BLOCK), self.part[0, :d, :d].split(BLOCK), M.T.split(BLOCK), strict=True)
            for start, strip, rows in strips:  # `narrow`: slicing takes longer than a small product
                strip.narrow(1, start, d - start).addmm_(rows, M.narrow(1, start, d - start), beta=beta)
        if ones:  # the last column of Σ [x 1]ᵀ[x 1] is (Σ x, m); the last row is filled by mirroring
            _add_(self.part[:, :d, d], x.sum(0), float(self.n > 0))
            self.part[:, d, d] = len(x) + (self.part[:, d, d] if self.n else 0)
        self.n += len(x)

    def _fold(self) -> None:
        """H ← H + part, in float64."""
        if self.n and self.part is not None:
            begun = self.H is not None
            H = self._room() if self.H is None else self.H
            for start in range(0, self.shape[1], BLOCK):  # entries below the diagonal blocks are uninitialised memory
                rows = slice(start, start + BLOCK)
                if begun:
                    add_converted_(H[:, rows, start:], self.part[:, rows, start:])
                else:
                    H[:, rows, start:].copy_(self.part[:, rows, start:])
            self.H = H
        self.n = 0

    def _single(self, like: Tensor) -> bool:
        """Whether sums of such rows stay in float32."""
        return not self.exact and like.dtype == stored_dtype(self.shape[1], like.dtype) == torch.float32

    def _sum(self, like: Tensor) -> Float[Tensor, "q d d"]:
        """The tensor that products of this dtype are added to, zero-initialised on first use."""
        if not self._single(like):
            self.H = self._room().zero_() if self.H is None else self.H
            return self.H
        if self.part is None:
            self.part = _aligned(like, *self.shape)
        if not self.n:
            self.part.zero_()
            self.n = 1  # marks `part` as in use; its number of rows does not matter for a float32 sum
        return self.part

    def _room(self) -> Float[Tensor, "q d d"]:
        return torch.empty(self.shape, dtype=torch.float64, device=self.device)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32: it has too few digits for sums over data."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _add_(total: Tensor, part: Tensor, beta: float) -> None:
    """total ← β total + part for β = 0 or 1; β = 0 also overwrites NaN, as in BLAS."""
    if beta:
        total.add_(part)
    else:
        total.copy_(part)


def add_converted_(total: Float[Tensor, "q d *e"], part: Float[Tensor, "q d *e"]) -> None:
    """total ← total + part in the dtype of `total`, a few rows at a time, so that converted rows stay in the cache."""
    step = max(1, _CONVERTED * part.shape[1] // max(1, part.numel()))
    for start in range(0, part.shape[1], step):
        rows = slice(start, start + step)
        total[:, rows].add_(part[:, rows])


def aligned_product(
    x: Float[Tensor, "m d"], y: Float[Tensor, "d e"], shift: Float[Tensor, " e"] | None = None
) -> Float[Tensor, "m e"]:
    """x y + shift with rows aligned in memory, which is faster; in plain torch operations if x requires grad."""
    if x.requires_grad:  # autograd does not support `out=`
        return x @ y if shift is None else torch.addmm(shift, x, y)
    product = torch.mm(x, y, out=_aligned(x, len(x), y.shape[1]))
    return product if shift is None else product.add_(shift)


def _aligned(like: Tensor, *shape: int) -> Float[Tensor, ...]:
    """An uninitialised tensor whose rows start at multiples of `_ALIGNED` entries.

    A bias column makes the last axis odd, so rows of a contiguous tensor would start at unaligned addresses.
    """
    *lead, e = shape
    return like.new_empty(*lead, -(-e // _ALIGNED) * _ALIGNED)[..., :e]


class _RowBuffer:
    """Collects small batches of rows until there are enough for one efficient multiplication.

    Rows are copied, as the caller may overwrite them: some loaders reuse the memory of a batch.
    """

    def __init__(self) -> None:
        self.pending: list[Tensor] = []
        self.n = 0

    def ready(self, x: Float[Tensor, "m ..."], *, ones: bool = False) -> Tensor | None:
        """Rows to multiply now: x itself, or all buffered rows with their column of ones; None if there are too few."""
        if not self.n and len(x) >= _FEWEST_ROWS:
            return x
        self.pending.append(torch.cat([x, x.new_ones(*x.shape[:-1], 1)], dim=-1) if ones else x.clone())
        self.n += len(x)
        return self.flush() if self.n >= _FEWEST_ROWS else None

    def state(self) -> State:
        return {"pending": self.pending, "n": self.n}

    def restore(self, state: State) -> None:
        self.pending, self.n = list(state["pending"]), state["n"]

    def flush(self) -> Tensor | None:
        """All buffered rows; the buffer is empty afterwards."""
        rows = torch.cat(self.pending) if self.n else None
        self.pending, self.n = [], 0
        return rows
