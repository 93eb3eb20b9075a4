"""Tables as the estimators train on them: distinct rows with weights, standardised, and a part held out.

Equal rows become one row with the sum of their weights, in an order of their own. So a weight of two is the same as the
row twice, to the bit, and the order of the rows plays no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FEWEST_HELD_OUT = 8  # rows; with fewer nothing is held out
_EIGHTHS = 8  # weights that are no whole numbers enter the curvature rounded to a multiple of their mean over this
_MOST_DOUBLE = 5_000  # rows up to which everything is in double precision

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Distinct rows and how much each counts."""

    X: Array
    y: Array  # (n, outputs), or (n,) of class numbers
    weight: Array

    @classmethod
    def distinct(cls, X: Array, y: Array, weight: Array | None) -> Rows:
        weight = np.ones(len(X)) if weight is None else weight
        counted = weight > 0
        X, y, weight = X[counted], y[counted], weight[counted]
        both = np.column_stack([X, y])
        _, first, group = np.unique(both, axis=0, return_index=True, return_inverse=True)
        total: Array = np.bincount(group.reshape(-1), weights=weight, minlength=len(first)).astype(np.float64)
        return cls(X[first], y[first], total)

    def __len__(self) -> int:
        return len(self.X)

    def at(self, rows: NDArray[np.int64]) -> Rows:
        return Rows(self.X[rows], self.y[rows], self.weight[rows])

    def joined(self, other: Rows) -> Rows:
        pairs = ((self.X, other.X), (self.y, other.y), (self.weight, other.weight))
        return Rows(*(np.concatenate(pair) for pair in pairs))

    def held_out(self, fraction: float, generator: np.random.RandomState, labels: bool) -> tuple[Rows, Rows | None]:
        """Some rows to stop and tune by, of every class its share; none where they would be too few."""
        n = len(self)
        if fraction * n < _FEWEST_HELD_OUT:
            return self, None
        order = generator.permutation(n)
        groups = [order[self.y[order] == c] for c in np.unique(self.y)] if labels else [order]
        taken = np.concatenate([group[: int(fraction * len(group))] for group in groups])
        kept = np.setdiff1d(np.arange(n), taken)
        return (self.at(kept), self.at(np.sort(taken))) if len(taken) else (self, None)

    def repeated(self) -> tuple[Rows, float]:
        """Rows as often as they count, and what to multiply the likelihood by then.

        Whole numbers are exact; others are rounded to eighths of their mean.
        """
        whole = np.round(self.weight)
        scale = 1.0
        if not np.array_equal(whole, self.weight):
            scale = float(self.weight.mean()) / _EIGHTHS
            whole = np.maximum(np.round(self.weight / scale), 1)
        index = np.repeat(np.arange(len(self)), whole.astype(np.int64))
        return self.at(index), scale


@dataclass(frozen=True)
class Scale:
    """v ↦ (v − mean) / std, column by column; constant columns keep their size."""

    mean: Array
    std: Array

    @classmethod
    def of(cls, v: Array, weight: Array) -> Scale:
        mean = np.average(v, axis=0, weights=weight)
        std = np.sqrt(np.average((v - mean) ** 2, axis=0, weights=weight))
        # What varies by rounding only is constant.
        constant = std <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
        return cls(mean, np.where(constant | (std == 0), 1.0, std))

    def apply(self, v: Array) -> Array:
        return (v - self.mean) / self.std


def dtype_for(n: int) -> torch.dtype:
    return torch.float64 if n <= _MOST_DOUBLE else torch.float32


def tensor(v: Array, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(v, dtype=dtype, device=device)
