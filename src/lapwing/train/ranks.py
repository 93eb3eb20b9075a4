"""Training on several ranks: every rank has a shard of the data and the same weights after every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lapwing.runtime import distributed


def start_alike(tensors: Sequence[Tensor]) -> None:
    """Rank 0's values on every rank, as DistributedDataParallel starts."""
    if distributed.is_distributed():
        found = distributed.broadcast([t.detach().cpu() for t in tensors] if distributed.rank() == 0 else None, 0)
        assert found is not None
        with torch.no_grad():
            for tensor, value in zip(tensors, found, strict=True):
                tensor.copy_(value.to(tensor.device))


def average_gradients(parameters: Sequence[nn.Parameter], n: int) -> int:
    """∇ per datum over all ranks' batches, weighted by how many data each has; the sum of those is returned.

    A rank that has no data left takes part with nothing.
    """
    if not distributed.is_distributed():
        return n
    flat = torch.cat([_gradient(p).double().reshape(-1).cpu() for p in parameters]) * n
    total = distributed.total(torch.cat([flat, torch.tensor([float(n)], dtype=torch.float64)]))
    count = int(total[-1])
    if count:
        start = 0
        for p in parameters:
            some = total[start : start + p.numel()].reshape(p.shape) / count
            p.grad = some.to(p)
            start += p.numel()
    return count


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
