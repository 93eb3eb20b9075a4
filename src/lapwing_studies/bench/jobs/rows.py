"""The data of a job: training, held-out and test rows; an input is one tensor or a mapping of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 128  # batch size for `lw.fit` and `lw.tune`

Input = Tensor | dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    x: Input
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, chosen: Tensor | slice) -> Rows:
        if isinstance(self.x, Tensor):
            return Rows(self.x[chosen], self.y[chosen])
        return Rows({name: values[chosen] for name, values in self.x.items()}, self.y[chosen])

    def batches(self, size: int = BATCH) -> list[tuple[Input, Tensor]]:
        parts = [self[start : start + size] for start in range(0, len(self), size)]
        return [(part.x, part.y) for part in parts]


@dataclass(frozen=True, eq=False)
class Cut:
    """Three disjoint parts of a dataset."""

    train: Rows
    held_out: Rows
    test: Rows

    @staticmethod
    def of(rows: Rows, sizes: Sequence[int], *, seed: int = 0) -> Cut:
        """Shuffled rows for each part, of these sizes; -1 takes the rest."""
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        train, held_out, test = (rows[part] for part in order.split(_lengths(len(rows), sizes))[:3])
        return Cut(train, held_out, test)

    def smaller(self, n: int) -> Cut:
        """At most n rows of each part: only to test that a job runs."""
        return Cut(self.train[:n], self.held_out[:n], self.test[:n])


def called(model: nn.Module, x: Input) -> Tensor:
    """The model's outputs, or its `.logits`."""
    f: Any = model(x) if isinstance(x, Tensor) else model(**x)
    return f if isinstance(f, Tensor) else f.logits


def _lengths(n: int, sizes: Sequence[int]) -> list[int]:
    taken = sum(size for size in sizes if size > 0)
    lengths = [n - taken if size < 0 else size for size in sizes]
    return [*lengths, n - sum(lengths)]
