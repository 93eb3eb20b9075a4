"""Rules for convolutions as linear maps of patches: s_t = W a_t + b with a_t the patch at output position t."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.network.jacobian import Inputs
from lapwing.network.layers.base import FactorRule
from lapwing.network.layers.patches import Patches, Window
from lapwing.operators import Arrangement

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _Divided(FactorRule):
    def captured(self, module: nn.Module, calls: tuple[Tensor, ...], n: int, arrangement: Arrangement) -> Inputs:
        return Patches(arrangement, calls, n, partial(self.inputs, module), window=None)

    def divides(self, module: nn.Module, x: Tensor, n: int) -> bool:
        assert isinstance(module, _CONVOLUTIONS + _TRANSPOSED)
        return x.ndim == len(module.kernel_size) + 2 and x.shape[0] % n == 0  # not a single datum without batch axis


class ConvolutionRule(_Divided):
    """Supports any stride, dilation, groups and padding mode."""

    def applies(self, module: nn.Module) -> bool:
        return isinstance(module, _CONVOLUTIONS) and any(type(module).forward is c.forward for c in _CONVOLUTIONS)

    def arrangement(self, module: nn.Module, weight: slice | None, bias: slice | None) -> Arrangement:
        assert isinstance(module, _CONVOLUTIONS)
        q, o = module.groups, module.out_channels // module.groups
        i = module.in_channels // q * prod(module.kernel_size)
        return Arrangement(q, o, weight, bias, (q, o, i), (0, 1, 2))

    def inputs(self, module: nn.Module, x: Tensor, n: int) -> Tensor:
        assert isinstance(module, _CONVOLUTIONS)
        if module.padding_mode == "zeros":
            x = F.pad(x, _zero_padding(module))
        else:
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        patches = _patches(x, module.kernel_size, module.stride, module.dilation, module.groups)
        return patches.reshape(n, -1, *patches.shape[2:])

    def captured(self, module: nn.Module, calls: tuple[Tensor, ...], n: int, arrangement: Arrangement) -> Inputs:
        if not isinstance(module, nn.Conv2d) or module.groups > 1 or module.padding_mode != "zeros":
            return super().captured(module, calls, n, arrangement)
        left, right, above, below = _zero_padding(module)
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        window = Window(kernel, stride, dilation, (above, below, left, right))  # type: ignore[arg-type]
        return Patches(arrangement, calls, n, partial(self.inputs, module), window)

    def gradients(self, module: nn.Module, g: Tensor, n: int) -> Tensor:
        assert isinstance(module, _CONVOLUTIONS)
        return _by_position(g, module.groups, n)


class TransposedConvolutionRule(_Divided):
    """A transposed convolution equals a convolution, with flipped kernel, of the input with zeros inserted (stride)."""

    def applies(self, module: nn.Module) -> bool:
        return isinstance(module, _TRANSPOSED) and any(type(module).forward is c.forward for c in _TRANSPOSED)

    def arrangement(self, module: nn.Module, weight: slice | None, bias: slice | None) -> Arrangement:
        assert isinstance(module, _TRANSPOSED)
        q, o, k = module.groups, module.out_channels // module.groups, prod(module.kernel_size)
        return Arrangement(q, o, weight, bias, (q, module.in_channels // q, o, k), (0, 2, 1, 3))

    def inputs(self, module: nn.Module, x: Tensor, n: int) -> Tensor:
        assert isinstance(module, _TRANSPOSED)
        d = len(module.kernel_size)
        padding: list[int] = []
        for axis in reversed(range(d)):  # F.pad counts from the last axis
            x = _with_zeros_between(x, axis - d, module.stride[axis])
            # F.pad with a negative number crops, as padding of a transposed convolution does.
            edge = module.dilation[axis] * (module.kernel_size[axis] - 1) - int(module.padding[axis])
            padding += [edge, edge + module.output_padding[axis]]
        x = F.pad(x, padding)
        ones = (1,) * d
        patches = _patches(x, module.kernel_size, ones, module.dilation, module.groups)
        shaped = patches.reshape(n, -1, module.groups, module.in_channels // module.groups, *module.kernel_size)
        return shaped.flip(tuple(range(-d, 0))).flatten(3)

    def gradients(self, module: nn.Module, g: Tensor, n: int) -> Tensor:
        assert isinstance(module, _TRANSPOSED)
        return _by_position(g, module.groups, n)


def _zero_padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """Left and right padding of each axis, last axis first, as F.pad expects."""
    if module.padding == "valid":
        return [0] * (2 * len(module.kernel_size))
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    sides: tuple[int, ...] = tuple(module.padding)  # type: ignore[arg-type]
    return [p for p in reversed(sides) for _ in range(2)]


def _patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    """(n, channels, …) → (n, r, q, channels/q · k), positions and kernel entries in row-major order."""
    d = len(kernel)
    if d == 2:  # F.unfold gives the same patches several times faster, but supports 2-d only
        columns = F.unfold(x, tuple(kernel), tuple(dilation), stride=tuple(stride))
        return columns.transpose(1, 2).unflatten(2, (groups, -1))
    for axis in range(d):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        x = x.unfold(2 + axis, span, stride[axis])[..., :: dilation[axis]]
    n, channels = x.shape[:2]
    positions, taps = range(2, 2 + d), range(2 + d, 2 + 2 * d)
    return x.permute(0, *positions, 1, *taps).reshape(n, -1, groups, channels // groups * prod(kernel))


def _by_position(g: Tensor, groups: int, n: int) -> Tensor:
    """(n, channels, …) → (n, r, q, channels/q); a view if every datum has one image."""
    g = g.flatten(2).mT.unflatten(-1, (groups, -1))
    return g if len(g) == n else g.reshape(n, -1, *g.shape[2:])


def _with_zeros_between(x: Tensor, axis: int, stride: int) -> Tensor:
    """Insert stride − 1 zeros between neighbours along an axis."""
    if stride == 1:
        return x
    shape = list(x.shape)
    shape[axis] = (shape[axis] - 1) * stride + 1
    spread = x.new_zeros(shape)
    index = [slice(None)] * x.ndim
    index[axis] = slice(None, None, stride)
    spread[tuple(index)] = x
    return spread
