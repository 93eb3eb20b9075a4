"""A dataset split into training, held-out and test parts, with out-of-distribution inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    x: Tensor
    y: Tensor

    def rows(self, chosen: Tensor | slice) -> Split:
        return Split(self.x[chosen], self.y[chosen])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Parts:
    """Three disjoint parts of a dataset, and as many out-of-distribution inputs as test inputs."""

    train: Split
    validation: Split
    test: Split
    outside: Tensor
    outside_is: str

    @property
    def n_classes(self) -> int:
        return int(self.train.y.max()) + 1


def shuffled(n: int, *, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def stratified(y: Tensor, shares: tuple[float, float], *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row numbers of three parts: the first two get `shares` of every class, the third the rest."""
    parts: list[list[Tensor]] = [[], [], []]
    order = shuffled(len(y), seed=seed)
    for label in y.unique():
        rows = order[y[order] == label]
        first = round(shares[0] * len(rows))
        second = first + round(shares[1] * len(rows))
        for part, chosen in zip(parts, (rows[:first], rows[first:second], rows[second:]), strict=True):
            part.append(chosen)
    train, validation, test = (torch.cat(part) for part in parts)
    return train, validation, test


@dataclass(frozen=True)
class Scaling:
    """(v − mean) / std by column, both from the training rows; a constant column is only shifted."""

    mean: Tensor
    std: Tensor

    @staticmethod
    def of(values: Tensor) -> Scaling:
        std = values.std(0, correction=0)
        return Scaling(values.mean(0), torch.where(std < 1e-10, torch.ones_like(std), std))

    def __call__(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.std


def wide_box(x: Tensor, n: int, *, seed: int) -> Tensor:
    """n points, uniform in a box with the centre of the training inputs and twice their range in every feature."""
    low, high = x.amin(0), x.amax(0)
    u = torch.rand(n, x.shape[1], generator=torch.Generator().manual_seed(seed))
    return (low + high) / 2 + (2 * u - 1) * (high - low)
