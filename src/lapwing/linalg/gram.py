"""Running sums of x xᵀ over many rows: products in the rows' own precision, sums over them in float64."""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg.symmetric import BLOCK, mirror_

_ENOUGH_ROWS = 2048  # few large products are faster than many small ones, and write the float64 sum less often


class GramSum:
    """Σ x xᵀ for rows x (m, q, d), per map q; only the upper block triangle is computed until the end."""

    def __init__(self, q: int, d: int, device: torch.device) -> None:
        self.H = torch.zeros(q, d, d, dtype=torch.float64, device=device)
        self.pending: list[Tensor] = []
        self.n_pending = 0

    def add(self, x: Float[Tensor, "m q d"]) -> None:
        self.pending.append(x)
        self.n_pending += len(x)
        if self.n_pending >= _ENOUGH_ROWS:
            self._fold()

    def add_product(self, product: Float[Tensor, "q d d"]) -> None:
        """Σ x xᵀ of some rows, multiplied out elsewhere."""
        self.H.add_(product)

    def add_transposed(self, x: Float[Tensor, "m d r"]) -> None:
        """Σ_m x xᵀ for one map, the rows x being columns here: they need not be copied to be multiplied."""
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        self.H[0].add_(x.new_zeros(x.shape[1], x.shape[1]).addbmm_(x, x.mT))

    def result(self) -> Float[Tensor, "q d d"]:
        self._fold()
        for H in self.H:
            mirror_(H)
        return self.H

    def _fold(self) -> None:
        if not self.pending:
            return
        x = self.pending[0] if len(self.pending) == 1 else torch.cat(self.pending)
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        self.pending, self.n_pending = [], 0
        d = x.shape[2]
        if x.shape[1] > 1 or d < 2 * BLOCK:
            by_map = x.transpose(0, 1)
            self.H.add_(by_map.mT @ by_map)
            return
        x = x[:, 0]
        for start in range(0, d, BLOCK):
            rows = slice(start, start + BLOCK)
            self.H[0, rows, start:].add_(x[:, rows].T @ x[:, start:])
