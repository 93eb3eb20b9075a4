"""Images that drift away from the training data: rotations, and corruptions at five severities.

The corruptions are our own, in place of CIFAR-10-C: noise, blur, contrast, brightness and occlusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

ANGLES = tuple(range(0, 181, 15))
SEVERITIES = (0, 1, 2, 3, 4, 5)


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Anticlockwise, bilinear, with zeros from outside; multiples of 90° are exact up to rounding."""
    a = math.radians(degrees)
    turn = torch.tensor([[math.cos(a), -math.sin(a), 0.0], [math.sin(a), math.cos(a), 0.0]], dtype=x.dtype)
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def corrupted(x: Tensor, severity: int, seed: int = 0) -> Tensor:
    """Every image with one of the corruptions in turn; `x` has a spread of about one, severity 0 leaves it alone."""
    if severity == 0:
        return x
    found = x.clone()
    generator = torch.Generator().manual_seed(seed)
    for k, corrupt in enumerate(CORRUPTIONS):
        found[k :: len(CORRUPTIONS)] = corrupt(x[k :: len(CORRUPTIONS)], severity / 5, generator)
    return found


def _noise(x: Tensor, s: float, generator: torch.Generator) -> Tensor:
    return x + s * torch.randn(x.shape, dtype=x.dtype, generator=generator)


def _blur(x: Tensor, s: float, generator: torch.Generator) -> Tensor:
    at = torch.arange(-3, 4, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (at / (2 * s)) ** 2)
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, 7)
    padded = F.pad(x, (3, 3, 3, 3), mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel, groups=x.shape[1]), kernel.mT, groups=x.shape[1])


def _contrast(x: Tensor, s: float, generator: torch.Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + (1 - 0.9 * s) * (x - mean)


def _brightness(x: Tensor, s: float, generator: torch.Generator) -> Tensor:
    return x + 1.5 * s


def _occlusion(x: Tensor, s: float, generator: torch.Generator) -> Tensor:
    """A square without content, with up to half the side of the image."""
    side, found = x.shape[-1], x.clone()
    size = max(1, round(0.5 * s * side))
    row, column = (int(torch.randint(0, side - size + 1, (), generator=generator)) for _ in range(2))
    found[..., row : row + size, column : column + size] = 0
    return found


CORRUPTIONS: tuple[Callable[[Tensor, float, torch.Generator], Tensor], ...] = (
    _noise, _blur, _contrast, _brightness, _occlusion,
)  # fmt: skip
