"""Networks and baselines of the study of shifts: MC dropout, and SWAG with a diagonal covariance."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from lapwing_studies.reproduce.parts import Split, shuffled

RATE, N_PASSES, BATCH = 1e-2, 20, 64  # of SGD from the trained weights


def dense(channels: int, side: int, dropout: float) -> nn.Sequential:
    """64-64-10 with ReLU; a rate of zero leaves dropout out."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width in (channels * side * side, 64):
        layers += [nn.Linear(width, 64), nn.ReLU(), *_dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def convolutional(channels: int, side: int, dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for c_in, c_out in ((channels, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(c_in, c_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), *_dropout(dropout)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (side // 8) ** 2, 10))


def _dropout(rate: float) -> list[nn.Module]:
    return [nn.Dropout(rate)] if rate else []


@torch.no_grad()
def dropout_draws(model: nn.Module, x: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
    """The mean softmax with dropout on; torch's global random state is restored."""
    seed = int(torch.randint(2**31, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.train()
        found = torch.stack([model(x).double().softmax(-1) for _ in range(n_samples)]).mean(0)
        model.eval()
    return found


def swag_draws(model: nn.Module, data: Split, n_samples: int, seed: int) -> list[nn.Module]:
    """Draws from N(mean, diag var) of the weights along N_PASSES more passes of SGD at a constant rate."""
    moving = deepcopy(model)
    optimiser = torch.optim.SGD(moving.parameters(), lr=RATE, momentum=0.9)
    visited = []
    for epoch in range(N_PASSES):
        for rows in shuffled(len(data), seed=1000 * seed + epoch).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(moving(data.x[rows]), data.y[rows]).backward()
            optimiser.step()
        visited.append(nn.utils.parameters_to_vector(moving.parameters()).detach())
    path = torch.stack(visited)
    mean, std = path.mean(0), path.std(0)
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for _ in range(n_samples):
        draw = deepcopy(model)
        nn.utils.vector_to_parameters(mean + std * torch.randn(std.shape, generator=generator), draw.parameters())
        draws.append(draw.eval())
    return draws
