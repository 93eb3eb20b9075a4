"""Train networks of one shape in parallel, each with its own prior precision, by batched matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lapwing_studies.reproduce.architectures import mlp, seeded
from lapwing_studies.reproduce.parts import Split

LEARNING_RATE = 1e-2  # of Adam, with a cosine schedule to zero
SummedLoss = Callable[[Tensor, Tensor], Tensor]  # ((g, n, c), (n,)) → a number: the sum over networks and data


def train_many(
    widths: Sequence[int], data: Split, loss: SummedLoss, precisions: Tensor, *, n_epochs: int, seed: int
) -> list[nn.Module]:
    """A tanh network for every precision δ: full-batch Adam on Σ loss + ½ δ ‖θ‖² from the same initial weights.

    Adam is elementwise, so each network is trained as it would be alone.
    """
    first = seeded(lambda: mlp(widths, nn.Tanh), seed=seed)
    stacked = [p.detach().expand(len(precisions), *p.shape).clone().requires_grad_() for p in first.parameters()]
    optimiser = torch.optim.Adam(stacked, lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, n_epochs)
    for _ in range(n_epochs):
        optimiser.zero_grad()
        penalty = sum(precisions @ p.square().flatten(1).sum(1) for p in stacked)
        (loss(_outputs(stacked, data.x), data.y) + 0.5 * penalty).backward()
        optimiser.step()
        schedule.step()
    return [_network(widths, [p.detach()[g] for p in stacked]) for g in range(len(precisions))]


def _outputs(stacked: list[Tensor], x: Tensor) -> Tensor:
    h = x.expand(len(stacked[0]), *x.shape)
    for i in range(0, len(stacked), 2):
        h = torch.baddbmm(stacked[i + 1][:, None], h if i == 0 else h.tanh(), stacked[i].mT)
    return h


def _network(widths: Sequence[int], tensors: list[Tensor]) -> nn.Module:
    model = mlp(widths, nn.Tanh)
    with torch.no_grad():
        for p, value in zip(model.parameters(), tensors, strict=True):
            p.copy_(value)
    return model.eval()
