"""The networks of the Variational Laplace study: softplus where others have ReLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def small_cnn(channels: int, side: int, n_classes: int) -> nn.Module:
    """Two strided convolutions and two dense layers."""
    after = ((side - 3) // 2 + 1 - 3) // 2 + 1
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2), nn.Softplus(), nn.Conv2d(16, 32, 3, 2), nn.Softplus()),
        *(nn.Flatten(), nn.Linear(32 * after * after, 64), nn.Softplus(), nn.Linear(64, n_classes)),
    )


class PreactBlock(nn.Module):
    """Norm and activation before each convolution; a projection where the shape changes (He and others, 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(after)
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        same = before == after and stride == 1
        self.shortcut = None if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.softplus(self.norm1(x))
        beside = x if self.shortcut is None else self.shortcut(h)
        return self.conv2(F.softplus(self.norm2(self.conv1(h)))) + beside


def preact_resnet18(channels: int, side: int, n_classes: int) -> nn.Module:
    """The paper's network."""
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [
        PreactBlock(before, after, 2 if after > before else 1)
        for before, after in zip((64, *widths), widths, strict=False)
    ]
    return nn.Sequential(
        *(nn.Conv2d(channels, 64, 3, 1, 1, bias=False), *blocks, nn.BatchNorm2d(512), nn.Softplus()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, n_classes)),
    )
