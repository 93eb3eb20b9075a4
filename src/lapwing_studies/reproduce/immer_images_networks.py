"""Networks of table 2: those of the released code, and a small one for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

N_CLASSES = 10


def small_cnn(channels: int, side: int) -> nn.Sequential:
    """Under 15,000 parameters on 28 × 28 grey images."""
    after = ((side - 4) // 2 - 2) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * after * after, 32), nn.Tanh(), nn.Linear(32, N_CLASSES),
    )  # fmt: skip


def three_and_three(channels: int, side: int) -> nn.Sequential:
    """Three convolutions and three dense layers, for 28 × 28 images: 28 → 24 → 12 → 10 → 5 → 5 → 3."""
    model = nn.Sequential(
        nn.Conv2d(channels, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        nn.Flatten(), nn.Linear(3 * 3 * 128, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(),
        nn.Linear(256, N_CLASSES),
    )  # fmt: skip
    return _initialised(model, bias=0.0)


def all_cnn(channels: int, side: int) -> nn.Sequential:
    """Nine convolutions and an average over positions, for 32 × 32 images; no dropout."""
    widths: Sequence[int] = (channels, 96, 96, 96, 192, 192, 192, 192, 192, N_CLASSES)
    layers: list[nn.Module] = []
    for k, (c_in, c_out) in enumerate(pairwise(widths)):
        kernel, padding = (3, 1 if k < 6 else 0) if k < 7 else (1, 0)
        layers += [nn.Conv2d(c_in, c_out, kernel, 2 if k in (2, 5) else 1, padding), nn.ReLU()]
    model = nn.Sequential(*layers[:-1], nn.AvgPool2d(6), nn.Flatten())
    return _initialised(model, bias=0.1)


def _initialised(model: nn.Sequential, *, bias: float) -> nn.Sequential:
    """Xavier: normal for convolutions, uniform for dense layers."""
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            (nn.init.xavier_normal_ if isinstance(layer, nn.Conv2d) else nn.init.xavier_uniform_)(layer.weight)
            assert layer.bias is not None
            nn.init.constant_(layer.bias, bias)
    return model
