"""Images with fine structure for larger reconstructions: a shell with cells inside, as in a slice through a walnut."""

from __future__ import annotations

import torch
from torch import Tensor


def walnut_like(n: int, *, seed: int = 0) -> Tensor:
    """An n × n image in [0, 1]: a round shell, folded walls between cells, and some bright kernels."""
    generator = torch.Generator().manual_seed(seed)
    at = torch.linspace(-1, 1, n, dtype=torch.float64)
    y, x = torch.meshgrid(at, at, indexing="ij")
    radius = (x.square() + y.square()).sqrt()
    cells = 1.3 * torch.rand(28, 2, dtype=torch.float64, generator=generator) - 0.65
    distances = ((x[..., None] - cells[:, 0]).square() + (y[..., None] - cells[:, 1]).square()).sqrt()
    nearest = distances.topk(2, largest=False)
    walls = (nearest.values[..., 1] - nearest.values[..., 0]) < 0.05
    grey = 0.25 + 0.35 * torch.rand(28, dtype=torch.float64, generator=generator)
    inside = radius < 0.78
    image = torch.where(inside, torch.where(walls, 0.05, grey[nearest.indices[..., 0]]), torch.zeros(()).double())
    return torch.where((radius >= 0.78) & (radius < 0.9), 0.9, image)
