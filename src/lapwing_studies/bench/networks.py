"""Small networks trained to a MAP estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(widths: Sequence[int], *, seed: int) -> nn.Sequential:
    """Linear layers with tanh in between. Restores torch's global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
        return nn.Sequential(*layers[:-1])


def train_map(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], *, precision: float, n_steps: int
) -> nn.Module:
    """Full-batch Adam on Σₙ −log p(yₙ | f(xₙ; θ)) + ½ δ ‖θ‖², with a cosine schedule.

    `loss` is the summed negative log likelihood and δ the prior precision, so the optimum is the mode of Lapwing's
    posterior. Dividing the objective by N changes step sizes, not the optimum.
    """
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, n_steps)
    for _ in range(n_steps):
        optimiser.zero_grad()
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        objective = (loss(model(x), y) + 0.5 * precision * penalty) / len(x)
        objective.backward()
        optimiser.step()
        schedule.step()
    optimiser.zero_grad()
    return model.eval()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: small networks are not faster on two, and slower on a busy machine."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
