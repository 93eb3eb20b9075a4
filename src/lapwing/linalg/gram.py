"""Running sums of x yᵀ over many rows: products in the rows' own precision, sums over them in float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg.symmetric import BLOCK, mirror_

_ENOUGH_ROWS = 2048  # few large products are faster than many small ones, and write the float64 sum less often


class GramSum:
    """Σ x xᵀ for rows x (m, q, d), per map q; only the upper block triangle is computed until the end."""

    def __init__(self, q: int, d: int, device: torch.device) -> None:
        self.H = torch.zeros(q, d, d, dtype=torch.float64, device=device)
        self.rows = Gathered()

    def add(self, x: Float[Tensor, "m q d"]) -> None:
        for rows in self.rows.with_more(x):
            self._fold(rows)

    def add_product(self, product: Float[Tensor, "q d d"]) -> None:
        """Σ x xᵀ of some rows, multiplied out elsewhere."""
        self.H.add_(product)

    def add_transposed(self, x: Float[Tensor, "m d r"]) -> None:
        """Σ_m x xᵀ for one map, the rows x being columns here: they need not be copied to be multiplied."""
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        self.H[0].add_(x.new_zeros(x.shape[1], x.shape[1]).addbmm_(x, x.mT))

    def result(self) -> Float[Tensor, "q d d"]:
        for x in self.rows.left():
            self._fold(x)
        for H in self.H:
            mirror_(H)
        return self.H

    def _fold(self, x: Float[Tensor, "m q d"]) -> None:
        d = x.shape[2]
        if x.shape[1] > 1 or d < 2 * BLOCK:
            by_map = x.transpose(0, 1)
            self.H.add_(by_map.mT @ by_map)
            return
        x = x[:, 0]
        for start in range(0, d, BLOCK):
            rows = slice(start, start + BLOCK)
            self.H[0, rows, start:].add_(x[:, rows].T @ x[:, start:])


class ProductSum:
    """Σ x yᵀ for rows x (m, q, d) and y (m, q, e), per map q."""

    def __init__(self, q: int, d: int, e: int, device: torch.device) -> None:
        self.total = torch.zeros(q, d, e, dtype=torch.float64, device=device)
        self.rows = Gathered(), Gathered()

    def add(self, x: Float[Tensor, "m q d"], y: Float[Tensor, "m q e"]) -> None:
        for left, right in zip(self.rows[0].with_more(x), self.rows[1].with_more(y), strict=True):
            self._fold(left, right)

    def result(self) -> Float[Tensor, "q d e"]:
        for x, y in zip(self.rows[0].left(), self.rows[1].left(), strict=True):
            self._fold(x, y)
        return self.total

    def _fold(self, x: Float[Tensor, "m q d"], y: Float[Tensor, "m q e"]) -> None:
        self.total.add_(x.transpose(0, 1).mT @ y.transpose(0, 1))


class Gathered:
    """Rows copied one after the other into one array until there are enough of them to be multiplied.

    Copied at once: whoever gave them may change them afterwards, as a loader does that fills one batch over and over.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.n = 0

    def with_more(self, x: Float[Tensor, "m ..."]) -> Iterator[Tensor]:
        """Arrays of rows that are enough, if any; each is valid until the next is asked for."""
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        if self.n + len(x) > _ENOUGH_ROWS:
            yield from self.left()
        if len(x) >= _ENOUGH_ROWS:
            yield x
            return
        if self.rows is None:
            self.rows = x.new_empty(_ENOUGH_ROWS, *x.shape[1:])
        self.rows[self.n : self.n + len(x)] = x
        self.n += len(x)

    def left(self) -> Iterator[Tensor]:
        if self.rows is not None and self.n:
            n, self.n = self.n, 0
            yield self.rows[:n]
