"""Layers whose way back is written out: `torch.export` takes no derivative that is computed while the program runs.

A cotangent g has one row for each of the K outputs: (B, K, …). `back` pulls it through a layer that saw x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.errors import StructureError


class Layer(ABC):
    """One step of a feed-forward network."""

    @abstractmethod
    def back(self, g: Tensor, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Same(Layer):
    """Dropout in evaluation mode."""

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        return g


@dataclass(frozen=True)
class Scaled(Layer):
    """A number times x, plus a number."""

    factor: float

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        return g * self.factor


@dataclass(frozen=True)
class Elementwise(Layer):
    derivative: Callable[[Tensor], Tensor]

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        return g * self.derivative(x)[:, None]


@dataclass(frozen=True)
class Reshaped(Layer):
    """Flatten, and other shapes of the same entries."""

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        return g.reshape(*g.shape[:2], *x.shape[1:])


@dataclass(frozen=True)
class Dense(Layer):
    module: nn.Linear

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        return g @ self.module.weight


@dataclass(frozen=True)
class Convolution(Layer):
    module: nn.Conv2d

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        m, k = self.module, g.shape[1]
        padding = _padding(m)
        spans = [d * (n - 1) + 1 for d, n in zip(m.dilation, m.kernel_size, strict=True)]
        sizes = zip(x.shape[2:], padding, spans, m.stride, strict=True)
        # Rows and columns at the end that no patch reached.
        left = [(size + 2 * p - span) % stride for size, p, span, stride in sizes]
        flat = F.conv_transpose2d(g.flatten(0, 1), m.weight, None, m.stride, padding, left, 1, m.dilation)
        return flat.unflatten(0, (-1, k))

    def patches(self, x: Tensor) -> Tensor:
        """(B, positions, channels · kernel)."""
        m = self.module
        return F.unfold(x, m.kernel_size, m.dilation, tuple(_padding(m)), m.stride).mT


@dataclass(frozen=True)
class MaxPool(Layer):
    """Windows side by side: the gradient goes to the first largest entry of each."""

    size: int

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        n, (height, width) = self.size, x.shape[2:]
        down, across = height // n, width // n
        windows = x[:, :, : down * n, : across * n].unflatten(3, (across, n)).unflatten(2, (down, n))
        flat = windows.transpose(3, 4).flatten(4)  # (B, C, down, across, n · n)
        first = flat.argmax(-1, keepdim=True) == torch.arange(n * n, device=x.device)
        spread = g[..., None] * first[:, None].to(g.dtype)
        image = spread.unflatten(-1, (n, n)).transpose(4, 5).flatten(5, 6).flatten(3, 4)
        return F.pad(image, (0, width - across * n, 0, height - down * n))


@dataclass(frozen=True)
class AveragePool(Layer):
    """Windows side by side; or all of the image."""

    size: int | None

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if self.size is None:
            g = g.reshape(*g.shape[:3], 1, 1)
            return (g / (height * width)).expand(*g.shape[:3], height, width)
        n = self.size
        image = (g / (n * n)).repeat_interleave(n, 3).repeat_interleave(n, 4)
        return F.pad(image, (0, width - image.shape[4], 0, height - image.shape[3]))


@dataclass(frozen=True)
class BatchNorm(Layer):
    """In evaluation mode: a scale and a shift for each channel."""

    module: nn.BatchNorm1d | nn.BatchNorm2d

    def back(self, g: Tensor, x: Tensor) -> Tensor:
        m = self.module
        assert m.running_var is not None
        scale = (m.running_var + m.eps).rsqrt() * (1.0 if m.weight is None else m.weight)
        return g * scale.reshape(-1, *[1] * (x.ndim - 2))

    def standardised(self, x: Tensor) -> Tensor:
        m = self.module
        return F.batch_norm(x, m.running_mean, m.running_var, eps=m.eps)


def _padding(m: nn.Conv2d) -> list[int]:
    if m.padding == "valid":
        return [0, 0]
    if m.padding == "same":
        spans = [d * (n - 1) for d, n in zip(m.dilation, m.kernel_size, strict=True)]
        if any(span % 2 for span in spans):
            raise StructureError('export: a convolution with padding="same" and an even kernel pads unevenly.')
        return [span // 2 for span in spans]
    return [int(p) for p in m.padding]


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / sqrt(2))) + x * (-0.5 * x * x).exp() / sqrt(2 * pi)


def _silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def layer_of(path: str, module: nn.Module) -> Layer:
    """What the module does on the way back, or an error in words."""
    kind = type(module)
    if kind in (nn.Identity, nn.Dropout, nn.Dropout2d, nn.AlphaDropout):
        return Same()
    simple: dict[type, Callable[[Tensor], Tensor]] = {
        nn.ReLU: lambda x: (x > 0).to(x.dtype),
        nn.Tanh: lambda x: 1 - torch.tanh(x).square(),
        nn.Sigmoid: lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
        nn.SiLU: _silu,
        nn.Softplus: torch.sigmoid,
        nn.GELU: _gelu,
    }
    if kind in simple and not (kind is nn.GELU and module.approximate != "none"):
        if isinstance(module, nn.Softplus) and (module.beta, module.threshold) != (1.0, 20.0):
            raise _refused(path, module)
        return Elementwise(simple[kind])
    if kind is nn.LeakyReLU:
        slope = float(module.negative_slope)  # type: ignore[arg-type]
        return Elementwise(lambda x: torch.where(x > 0, 1.0, slope))
    if kind is nn.ELU:
        alpha = float(module.alpha)  # type: ignore[arg-type]
        return Elementwise(lambda x: torch.where(x > 0, torch.ones_like(x), alpha * x.clamp(max=0).exp()))
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        return Reshaped()
    if kind is nn.Linear:
        return Dense(module)  # type: ignore[arg-type]
    if kind is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        return Convolution(module)  # type: ignore[arg-type]
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d) and module.running_mean is not None:
        return BatchNorm(module)  # type: ignore[arg-type]
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d) and _side_by_side(module):
        return (
            MaxPool(_one(module.kernel_size))
            if isinstance(module, nn.MaxPool2d)
            else AveragePool(_one(module.kernel_size))
        )
    if kind is nn.AdaptiveAvgPool2d and module.output_size in (1, (1, 1)):
        return AveragePool(None)
    raise _refused(path, module)


def _side_by_side(module: nn.MaxPool2d | nn.AvgPool2d) -> bool:
    plain = _one(module.kernel_size) == _one(module.stride) > 0 and not module.ceil_mode and _one(module.padding) == 0
    return plain and getattr(module, "dilation", 1) in (1, (1, 1))


def _one(size: object) -> int:
    """A square window's side; 0 for others."""
    if isinstance(size, tuple):
        return int(size[0]) if len(set(size)) == 1 else 0
    return int(size)  # type: ignore[call-overload]


def _refused(path: str, module: nn.Module) -> StructureError:
    return StructureError(
        f"export: '{path}' ({module}) is no layer whose derivative export writes out: linear layers, plain "
        "convolutions, BatchNorm, flattening, pooling in windows side by side, and common activations, their sums and "
        'concatenations. For any other body fit the last layer alone: params="last_layer".'
    )
