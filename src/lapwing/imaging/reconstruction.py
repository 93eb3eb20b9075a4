"""A deep image prior: a network with a fixed input is trained until its output explains one set of measurements.

    loss = mean((A f(θ) − y)²) + γ TV(f(θ))

Ulyanov, Vedaldi and Lempitsky (2018); with total variation, Baguer, Leuschner and Schmidt (2020).
"""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError, NumericalError, ShapeError, warn
from lapwing.imaging.descent import Descent, Objective, Step
from lapwing.imaging.operator import Operator, as_tensor
from lapwing.imaging.total_variation import automatic, psnr
from lapwing.imaging.unet import UNet
from lapwing.runtime.arguments import counted, positive, seeded
from lapwing.runtime.progress import bar
from lapwing.runtime.sandbox import plain_tensors, random_state_kept
from lapwing.storage import Checkpoint, reconstruction_binding

_RECORDED = 200  # points of the history


@dataclass(frozen=True, eq=False, repr=False)
class Reconstruction:
    """The image that a network was trained to, and everything that error bars need."""

    operator: Operator
    data: Tensor
    network: nn.Module  # trained, in eval mode
    input: Tensor
    image: Float[Tensor, "h w"]
    tv: float
    noise_std: float | None  # where it was given, or estimated for tv="auto"
    history: tuple[Step, ...] = field(default=())
    stopped: int = 0  # the step whose parameters were kept

    def __repr__(self) -> str:
        return f"Reconstruction({self.operator!r}, tv={self.tv:.3g}, best of {self._steps} steps: {self.stopped})"

    @property
    def _steps(self) -> int:
        return self.history[-1].step if self.history else 0

    def psnr(self, truth: Any) -> float:
        """Peak signal-to-noise ratio in decibels; the range is that of the truth."""
        return float(psnr(self.image.double(), _truth(truth, self.operator).double()))


@plain_tensors()
def reconstruct(
    A: Operator,
    y: Any,
    *,
    tv: float | str = "auto",
    steps: int = 3000,
    network: nn.Module | None = None,
    input: Any = None,
    truth: Any = None,
    noise_std: float | None = None,
    lr: float = 1e-3,
    clip: float = 1.0,
    held_out: float | None = None,
    checkpoint: Any = None,
    every: float = 60,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Reconstruction:
    """Train a copy of the network on y by Adam, and keep the parameters of the lowest loss.

    `tv`: γ, or "auto" for a weight chosen from the level of the noise, `noise_std` or an estimate of it. `held_out`:
    this share of the measurements is left out of the loss, and decides when to stop. `truth` is for the progress only.
    `checkpoint`: a directory; an interrupted call goes on from there, to the same bits.
    """
    data, z, net = _prepared(A, y, input, network)
    n_steps = counted("steps", steps, "step")
    rate, most = positive("lr", lr), positive("clip", clip)
    sigma = None if noise_std is None else positive("noise_std", noise_std)
    gamma, sigma = _weight(tv, A, data, sigma)
    target = None if truth is None else _truth(truth, A)
    random = seeded(generator)
    mask = _mask(held_out, data, random)
    start = int(torch.randint(2**31, (1,), generator=random))
    dtype, device = z.dtype, z.device
    objective = Objective(A, data.to(device, dtype), z, gamma, None if mask is None else mask.to(device), target)
    with random_state_kept():
        torch.manual_seed(start)
        descent = Descent(net, objective, rate, most)
        keeper = None
        if checkpoint is not None:
            options = {"tv": gamma, "steps": n_steps, "lr": rate, "clip": most, "held_out": held_out, "seed": start}
            tensors = {"the data": data, "the input": z, "the operator": A(_ramp(A).to(device, dtype))}
            bound = reconstruction_binding(net, tensors, options)
            keeper = Checkpoint.of_reconstruction(checkpoint, every, bound, device)
        with keeper.going_on() if keeper is not None else nullcontext():
            _run(descent, n_steps, keeper, progress)
        image = descent.finished()
    history = tuple(descent.history)
    return Reconstruction(A, data, net, z, image, gamma, sigma, history, descent.best_step)


def _run(descent: Descent, n_steps: int, keeper: Checkpoint | None, progress: bool | None) -> None:
    found = None if keeper is None else keeper.resumed()
    if found is not None:
        descent.restore(found)
    shown = bar(range(descent.step, n_steps), total=n_steps, what="reconstructing", progress=progress)
    shown.update(0)
    every = max(1, n_steps // _RECORDED)
    try:
        for step in shown:
            record = descent.advance(record=step % every == 0 or step == n_steps - 1)
            if record is not None:
                shown.set_postfix_str(record.said())
            if descent.diverged:
                if descent.best_step == 0:
                    raise NumericalError(
                        f"The loss is not finite after {step + 1} steps: lower lr, or check the scale of the data."
                    )
                warn(f"reconstruct: the loss is not finite at step {step + 1}; the best before is kept. Lower lr.")
                break
            if descent.exhausted(n_steps):
                break
            if keeper is not None:
                keeper.offer(descent.state)
    finally:
        shown.close()


# --- what the user gave -----------------------------------------------------------------------------------


def _prepared(A: Any, y: Any, z: Any, network: Any) -> tuple[Tensor, Tensor, nn.Module]:
    """Data, the network's input and a copy of the network: whatever does not fit is refused here."""
    if not isinstance(A, Operator):
        raise InputTypeError(
            f"reconstruct: expected an operator such as lw.imaging.radon(28, 20), got {type(A).__name__}. A matrix: "
            "lw.imaging.Operator(matrix, image_shape)."
        )
    data = as_tensor(y, "data").detach()
    if tuple(data.shape) != A.data_shape:
        raise ShapeError(f"reconstruct: the data have shape {tuple(data.shape)}; {A!r} gives {A.data_shape}.")
    if not bool(torch.isfinite(data).all()):
        raise InputError("reconstruct: the data hold NaN or infinite values.")
    if len(A.image_shape) != 2:
        raise ShapeError(f"reconstruct: images must have two axes; this operator's have {A.image_shape}.")
    net = default_network(A.image_shape) if network is None else _copied(network)
    first = next((p for p in net.parameters() if p.is_floating_point()), None)
    if first is None or not any(p.requires_grad for p in net.parameters()):
        raise InputError("reconstruct: the network has no parameter with requires_grad: nothing can be trained.")
    if z is None:
        z = (A.fbp(data) if A.has_fbp else A.adjoint(data))[None, None]
    z = as_tensor(z, "input").detach().to(first.device, first.dtype).clone()
    if not bool(torch.isfinite(z).all()):
        raise InputError("reconstruct: the network's input holds NaN or infinite values.")
    _check_output(net, z, A)
    return data, z, net


def default_network(shape: tuple[int, ...]) -> UNet:
    """Three scales for images of about 28 pixels, one more for every doubling, six at most."""
    size = min(shape)
    scales = 3 + round(torch.tensor(size / 28.0).log2().item())
    return UNet(32, max(1, min(scales, 6)))


def _copied(network: Any) -> nn.Module:
    if not isinstance(network, nn.Module):
        raise InputTypeError(f"reconstruct: network must be an nn.Module, got {type(network).__name__}.")
    return deepcopy(network)


def _check_output(net: nn.Module, z: Tensor, A: Operator) -> None:
    mode = net.training
    with torch.no_grad(), random_state_kept():
        try:
            found = net.eval()(z)
        except Exception as error:
            raise ShapeError(
                f"reconstruct: the network raised {type(error).__name__} on its input of shape {tuple(z.shape)}: "
                f"{error}. Give the input that it takes: input=..."
            ) from error
    net.train(mode)
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if not isinstance(found, Tensor) or tuple(s for s in found.shape if s != 1) != tuple(
        s for s in A.image_shape if s != 1
    ):
        raise ShapeError(
            f"reconstruct: the network's output has shape {shape}; expected one image of {A.image_shape}, such as "
            f"{(1, 1, *A.image_shape)}."
        )
    if not bool(torch.isfinite(found).all()):
        raise InputError("reconstruct: the network's output holds NaN or infinite values before training.")


def _weight(tv: Any, A: Operator, data: Tensor, noise_std: float | None) -> tuple[float, float | None]:
    if isinstance(tv, str):
        if tv != "auto":
            raise InputError(f'tv: expected a number or "auto", got {tv!r}.')
        return automatic(A, data, noise_std)
    if isinstance(tv, bool) or not isinstance(tv, int | float):
        raise InputTypeError(f'tv: expected a number or "auto", got {type(tv).__name__}.')
    if not (isfinite(tv) and tv >= 0):
        raise InputError(f"tv: the weight of the total variation must be zero or positive, got {tv}.")
    return float(tv), noise_std


def _truth(truth: Any, A: Operator) -> Tensor:
    image = as_tensor(truth, "truth").detach()
    if tuple(image.shape) != A.image_shape:
        raise ShapeError(f"truth: expected an image of {A.image_shape}, got {tuple(image.shape)}.")
    return image


def _mask(held_out: Any, data: Tensor, generator: torch.Generator) -> Tensor | None:
    """Where the measurements are that train the network; None for all of them."""
    if held_out is None:
        return None
    share = positive("held_out", held_out)
    count = round(share * data.numel())
    if share >= 0.5 or count < 1:
        raise InputError(f"held_out: a share of the measurements below one half, and one at least; got {held_out}.")
    mask = torch.ones(data.numel(), dtype=torch.bool)
    mask[torch.randperm(data.numel(), generator=generator)[:count]] = False
    return mask.reshape(data.shape)


def _ramp(A: Operator) -> Tensor:
    """An image by which operators are told apart."""
    return torch.arange(A.linear.d, dtype=torch.float64).cos().reshape(A.image_shape)
