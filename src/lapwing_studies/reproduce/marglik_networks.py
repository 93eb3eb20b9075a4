"""The networks of Immer and others (2021b), at smaller sizes: an MLP, a CNN, and a ResNet without normalisation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    """A learned scale and shift of all entries, as Fixup has in place of norms (Zhang, Dauphin and Ma, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class FixupBlock(nn.Module):
    """Two convolutions beside the identity; the second starts at zero."""

    def __init__(self, before: int, after: int, stride: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.scaled, self.between = Scaled(), Scaled()
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()
        with torch.no_grad():
            self.conv1.weight.mul_(depth**-0.5)
            self.conv2.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.between(self.conv1(x)))
        return torch.tanh(self.shortcut(x) + self.scaled(self.conv2(h)))


def mlp(channels: int, side: int, n_classes: int) -> nn.Module:
    sizes = (channels * side * side, 128, 64)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]), nn.Tanh(),
        nn.Linear(sizes[2], n_classes),
    )  # fmt: skip


def cnn(channels: int, side: int, n_classes: int) -> nn.Module:
    after = ((side - 3) // 2 + 1 - 3) // 2 + 1
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2), nn.Tanh(), nn.Conv2d(16, 32, 3, 2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(32 * after * after, 64), nn.Tanh(), nn.Linear(64, n_classes)),
    )


def fixup_resnet(channels: int, side: int, n_classes: int) -> nn.Module:
    """Three stages of two blocks, without batch normalisation."""
    widths = (16, 16, 16, 32, 32, 64, 64)
    blocks = [FixupBlock(a, b, 2 if b > a else 1, len(widths) - 1) for a, b in pairwise(widths)]
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 1, 1), nn.Tanh(), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, n_classes)),
    )


Network = Callable[[int, int, int], nn.Module]
NETWORKS: dict[str, Network] = {"MLP": mlp, "CNN": cnn, "ResNet": fixup_resnet}
