"""The reconstruction network linearised at its weights: rows of J, and products with J and Jᵀ.

f(θ) ≈ x̂ + J (θ − θ̂) for one input, so images are the outputs of one datum. Everything is the library's own linearised
network; what is added is that rows of any linear function of the image come a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from lapwing._types import Float, Tensor
from lapwing.data.inputs import ModelInput, as_input
from lapwing.errors import LapwingError
from lapwing.imaging.blocks import weights
from lapwing.network.jacobian import Jacobian
from lapwing.network.linearised import Linearised, Trace
from lapwing.network.products import Jvp, choose_jvp
from lapwing.network.rule_check import linearise
from lapwing.runtime.progress import shown

_ROWS_FLOATS = 1 << 24  # of rows that are formed at a time


class _OneDatum(nn.Module):
    """A network that takes its input as a whole, whatever its axes mean, as one that takes a batch."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.network(one).reshape(-1) for one in x])


@dataclass(frozen=True, eq=False)
class ImageJacobian:
    """J (pixels, weights) of the image at the trained weights."""

    linearised: Linearised
    z: ModelInput
    jvp: Jvp

    @classmethod
    def of(cls, network: nn.Module, z: Tensor) -> ImageJacobian:
        """Of a network in eval mode; its weights are copied, so training on changes nothing here."""
        mode = [(module, module.training) for module in network.modules()]
        network.eval()
        try:
            linearised, x = _linearised(network, z)
        finally:
            for module, training in mode:
                module.training = training
        return cls(linearised, x, choose_jvp(linearised, x))

    @property
    def p(self) -> int:
        return self.linearised.layout.p

    @property
    def n_pixels(self) -> int:
        return self.linearised.k

    @property
    def dtype(self) -> torch.dtype:
        return self.linearised.network.dtype or torch.float32

    @property
    def theta(self) -> Float[Tensor, " p"]:
        return self.linearised.theta.cpu()

    def image(self) -> Float[Tensor, " d"]:
        return self.linearised.outputs(self.z)[0].double().cpu()

    def traced(self) -> AbstractContextManager[Trace]:
        return self.linearised.trace(self.z)

    def rows(
        self, U: Float[Tensor, "m d"], *, progress: bool | None = False
    ) -> Iterator[tuple[slice, Float[Tensor, "c p"]]]:
        """U J, some rows at a time, in the network's precision."""
        step = max(1, min(64, _ROWS_FLOATS // self.p))
        starts = range(0, len(U), step)
        with self.traced() as trace:
            for start in shown(starts, total=len(starts), what="linearising", progress=progress):
                some = U[start : start + step].to(trace.f)
                yield slice(start, start + len(some)), self._written(trace.rows(some.T[None]))

    def all_rows(self, U: Float[Tensor, "m d"], *, progress: bool | None = False) -> Float[Tensor, "m p"]:
        """U J in one piece."""
        out = torch.empty(len(U), self.p, dtype=self.dtype)
        for place, rows in self.rows(U, progress=progress):
            out[place] = rows
        return out

    def _written(self, J: Jacobian) -> Float[Tensor, "c p"]:
        out = torch.zeros(J.c, self.p, dtype=self.dtype)
        for block in J.blocks:
            for place, part in zip(block.slices, block.parts(), strict=True):
                out[:, place] = part[0].to("cpu", self.dtype)
        return out

    def push(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m d"]:
        """J v for each row."""
        with self.linearised.unrecorded(self.z) as trace:
            found = self.jvp(trace, v.to(trace.f.device))[:, 0]
            trace.put_back()
        return found.double().cpu()

    def pull(self, u: Float[Tensor, "m d"]) -> Float[Tensor, "m p"]:
        """Jᵀ u for each row."""
        out = torch.zeros(len(u), self.p, dtype=torch.float64)
        with self.linearised.unrecorded(self.z) as trace:
            for row, each in zip(out, u, strict=True):
                total = torch.zeros(self.p, dtype=torch.float64, device=trace.f.device)
                trace.add_vjp_(total, each[None].to(trace.f))
                row.copy_(total)
        return out


def _linearised(network: nn.Module, z: Tensor) -> tuple[Linearised, ModelInput]:
    """As a network of a batch of one; one that cannot take a batch is called with its input alone."""
    try:
        if z.ndim > 1 and len(z) == 1:
            x = as_input(z, "input")
            return linearise(network, lambda model, _: weights(model), x), x
    except LapwingError:
        pass
    x = as_input(z[None], "input")
    return linearise(_OneDatum(network), lambda model, _: weights(model), x), x
