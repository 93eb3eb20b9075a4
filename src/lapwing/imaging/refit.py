"""Weights of the linear model, fitted to the reconstruction's own loss: the mode that total variation leaves."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lapwing._types import Float, Tensor
from lapwing.imaging.operator import Operator
from lapwing.imaging.total_variation import total_variation
from lapwing.runtime.progress import shown

_RATE, _STEPS, _DECAY = 1e-4, 1000, 1e-6
Product = Callable[[Tensor], Tensor]


def refitted(
    A: Operator,
    y: Tensor,
    image: Float[Tensor, "h w"],
    theta: Float[Tensor, " p"],
    push: Product,
    pull: Product,
    gamma: float,
    *,
    progress: bool | None = None,
) -> Float[Tensor, " p"]:
    """argmin over θ of mean((A h(θ) − y)²) + γ TV(h(θ)), h(θ) = x̂ + J (θ − θ̂): Adam from θ̂, after Antorán et al."""
    moved = theta.clone().requires_grad_()
    adam = torch.optim.Adam([moved], lr=_RATE, weight_decay=_DECAY)
    best, kept = float("inf"), theta.clone()
    for _ in shown(range(_STEPS), total=_STEPS, what="refitting the linear model", progress=progress):
        now = moved.detach().clone()
        with torch.enable_grad():
            h = (image + push((now - theta)[None])[0].reshape(image.shape)).requires_grad_()
            loss = (A(h) - y).square().mean() + gamma * total_variation(h)
            (slope,) = torch.autograd.grad(loss, h)
        if float(loss.detach()) < best:
            best, kept = float(loss.detach()), now
        moved.grad = pull(slope.reshape(1, -1))[0]
        adam.step()
    return kept
