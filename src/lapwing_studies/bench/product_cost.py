"""Time and memory of products with the whole GGN of a residual network, in a process of its own.

    python -m lapwing_studies.bench.product_cost WIDTH N_IMAGES

The networks are ResNet-18 of growing width; 64 is the usual one, of eleven million parameters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.bench.memory import peak_mib, resident_mib

SIDE, N_CLASSES, BATCH = 8, 10, 50
N_VECTORS = 8
_REPEATS = 3


class ProductCost(TypedDict):
    """CPU times in units of a gradient pass over the same data; memory in MiB above that before the work."""

    width: int
    p: int
    n_images: int
    gradient_seconds: float
    one_vector: float
    per_vector_of_eight: float
    fit_mib: float | None
    one_vector_mib: float | None
    eight_vectors_mib: float | None
    vector_mib: float


class ResidualBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(c_out), nn.BatchNorm2d(c_out)])
        plain = c_in == c_out and stride == 1
        down = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))
        self.skip = nn.Identity() if plain else down

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(h)) + self.skip(x))


def resnet18(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    c_in = width
    for k in range(4):
        c_out = width * 2**k
        layers += [ResidualBlock(c_in, c_out, 1 if k == 0 else 2), ResidualBlock(c_out, c_out, 1)]
        c_in = c_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, N_CLASSES))


def measured(width: int, n_images: int) -> ProductCost:
    torch.manual_seed(0)
    model = resnet18(width).eval()
    x, y = torch.randn(n_images, 3, SIDE, SIDE), torch.randint(N_CLASSES, (n_images,))
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, n_images, BATCH)]
    loss = nn.CrossEntropyLoss(reduction="sum")

    def gradient() -> None:
        model.zero_grad(set_to_none=True)
        for some, labels in batches:
            loss(model(some), labels).backward()

    p = sum(w.numel() for w in model.parameters())
    before = resident_mib() or 0.0
    found: list[lw.Posterior] = []

    def fit() -> None:
        structure = lw.MatrixFree(preconditioner=None)
        found.append(lw.fit(model, batches, "classification", structure=structure, progress=False))

    fit_mib = peak_mib(fit)
    H = found[0].curvature
    v = torch.randn(N_VECTORS, p, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one_mib, eight_mib = peak_mib(lambda: H.mv(v[:1])), peak_mib(lambda: H.mv(v))
    # Alternate, so that a busy machine slows down all of them equally.
    rounds = [(_seconds(gradient), _seconds(lambda: H.mv(v[:1])), _seconds(lambda: H.mv(v))) for _ in range(_REPEATS)]
    return ProductCost(
        width=width,
        p=p,
        n_images=n_images,
        gradient_seconds=median(g for g, _, _ in rounds),
        one_vector=median(one / g for g, one, _ in rounds),
        per_vector_of_eight=median(eight / g / N_VECTORS for g, _, eight in rounds),
        fit_mib=None if fit_mib is None else fit_mib - before,
        one_vector_mib=None if one_mib is None else one_mib - before,
        eight_vectors_mib=None if eight_mib is None else eight_mib - before,
        vector_mib=8 * p / 2**20,
    )


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this process only, so other processes do not count."""
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measured(int(sys.argv[1]), int(sys.argv[2]))))
