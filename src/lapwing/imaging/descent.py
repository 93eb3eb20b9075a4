"""Adam on the loss of a deep image prior, one step at a time: its state can be written down and taken up again."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, State, Tensor
from lapwing.imaging.operator import Operator
from lapwing.imaging.total_variation import psnr, total_variation

_LARGEST = 1000.0  # weight
_PATIENCE = 0.2  # share of all steps without a better held-out error after which it is enough


@dataclass(frozen=True)
class Step:
    """One point of the history; PSNR in decibels where the truth is known, the held-out error where there is one."""

    step: int
    loss: float
    psnr: float | None = None
    held_out: float | None = None

    def said(self) -> str:
        parts = [f"loss {self.loss:.3g}"]
        parts += [] if self.psnr is None else [f"PSNR {self.psnr:.2f} dB"]
        parts += [] if self.held_out is None else [f"held out {self.held_out:.3g}"]
        return ", ".join(parts)


@dataclass(frozen=True, eq=False)
class Objective:
    """mean((A f − y)²) + γ TV(f), over the measurements where the mask is true."""

    A: Operator
    y: Tensor
    z: Tensor
    gamma: float
    mask: Tensor | None
    truth: Tensor | None

    def image(self, network: nn.Module) -> Float[Tensor, "h w"]:
        return network(self.z).reshape(self.A.image_shape)

    def loss(self, image: Float[Tensor, "h w"]) -> tuple[Tensor, float | None]:
        """The loss, and the mean squared error of the measurements that are held out."""
        squared = (self.A(image) - self.y).square()
        held_out = None
        if self.mask is not None:
            held_out = float(squared.detach()[~self.mask].mean())
            squared = squared[self.mask]
        loss = squared.mean()
        return (loss + self.gamma * total_variation(image) if self.gamma else loss), held_out


class Descent:
    """The network, Adam's moments, the best parameters so far and the history."""

    def __init__(self, network: nn.Module, objective: Objective, lr: float, clip: float) -> None:
        self.network, self.objective, self.clip = network.train(), objective, clip
        self.parameters: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        self.adam = torch.optim.Adam(self.parameters, lr=lr)
        self.step, self.best_step, self.best_loss = 0, 0, inf
        self.best = [t.detach().clone() for t in self._tensors()]
        self.history: list[Step] = []
        self.diverged = False

    def advance(self, *, record: bool) -> Step | None:
        """One step; its loss is that of the parameters before it."""
        with torch.enable_grad():
            self.adam.zero_grad(set_to_none=True)
            image = self.objective.image(self.network)
            loss, held_out = self.objective.loss(image)
            loss.backward()
        value = float(loss.detach())
        if not isfinite(value):
            self.diverged = True
            return None
        self.step += 1
        self._keep(value if held_out is None else held_out)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.adam.step()
        with torch.no_grad():
            torch._foreach_clamp_min_(self.parameters, -_LARGEST)
            torch._foreach_clamp_max_(self.parameters, _LARGEST)
        if not record:
            return None
        truth = self.objective.truth
        quality = None if truth is None else float(psnr(image.detach().double().cpu(), truth.double().cpu()))
        self.history.append(Step(self.step, value, quality, held_out))
        return self.history[-1]

    def exhausted(self, n_steps: int) -> bool:
        """Whether held-out measurements have not been explained better for long."""
        if self.objective.mask is None:
            return False
        return self.step - self.best_step > max(20, _PATIENCE * n_steps)

    def finished(self) -> Float[Tensor, "h w"]:
        """The best parameters in the network, in eval mode, and its image."""
        if not self.diverged:
            with torch.no_grad():
                loss, held_out = self.objective.loss(self.objective.image(self.network))
            self.step += 1
            self._keep(float(loss) if held_out is None else held_out)
        with torch.no_grad():
            for tensor, best in zip(self._tensors(), self.best, strict=True):
                tensor.copy_(best)
            _settle_norms(self.network, self.objective)
            self.adam.zero_grad(set_to_none=True)
            return self.objective.image(self.network.eval()).clone()

    def state(self) -> State:
        moments = self.adam.state_dict()["state"]
        return {
            "step": self.step,
            "best_step": self.best_step,
            "best_loss": self.best_loss,
            "tensors": [t.detach().clone() for t in self._tensors()],
            "best": self.best,
            "moments": [[m["step"], m["exp_avg"], m["exp_avg_sq"]] for m in moments.values()],
            "history": [[s.step, s.loss, s.psnr, s.held_out] for s in self.history],
            "random": torch.get_rng_state(),
        }

    def restore(self, state: State) -> None:
        self.step, self.best_step, self.best_loss = state["step"], state["best_step"], state["best_loss"]
        with torch.no_grad():
            for tensor, kept in zip(self._tensors(), state["tensors"], strict=True):
                tensor.copy_(kept)
        self.best = list(state["best"])
        names = ("step", "exp_avg", "exp_avg_sq")
        moments: dict[int, Any] = {k: dict(zip(names, kept, strict=True)) for k, kept in enumerate(state["moments"])}
        self.adam.load_state_dict({**self.adam.state_dict(), "state": moments})
        self.history = [Step(*kept) for kept in state["history"]]
        torch.set_rng_state(state["random"])

    def _keep(self, score: float) -> None:
        if score < self.best_loss:
            self.best_loss, self.best_step = score, self.step
            with torch.no_grad():
                for best, tensor in zip(self.best, self._tensors(), strict=True):
                    best.copy_(tensor)

    def _tensors(self) -> list[Tensor]:
        return [*self.network.parameters(), *self.network.buffers()]


def _settle_norms(network: nn.Module, objective: Objective) -> None:
    """Running statistics become those of the one input, so that eval mode gives the image that was trained."""
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not norms:
        return
    kept = [m.momentum for m in norms]
    for module in norms:
        module.momentum = 1.0
    objective.image(network.train())
    for module, momentum in zip(norms, kept, strict=True):
        module.momentum = momentum
