"""The default network of a deep image prior: a U-Net from a fixed input image to the reconstruction.

After Antorán, Barbano, Leuschner, Hernández-Lobato and Jin (2022). Convolutions 3 × 3 in every block, 1 × 1 in the skip
connections and at the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.errors import InputError, InputTypeError
from lapwing.runtime.sandbox import random_state_kept

_SLOPE = 0.2  # of the leaky rectifiers
_SATURATED = 15.0  # the largest input of the sigmoid


class UNet(nn.Module):
    """Images (1, 1, h, w) → images of the same shape, of any size.

    `scales`: levels, each of half the resolution of the one above. `channels`: of all levels, or one number for each.
    `skips`: channels of the skip connection at each level but the lowest; zero for none. `norm`: "group" for group
    normalisation. `sigmoid`: values between 0 and 1. `seed` of the initial weights.
    """

    def __init__(
        self,
        channels: int | Sequence[int] = 32,
        scales: int | None = None,
        skips: int | Sequence[int] = 4,
        *,
        norm: str | None = None,
        sigmoid: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        widths = _widths(channels, scales)
        beside = _repeated("skips", skips, len(widths) - 1, least=0)
        if norm not in (None, "group"):
            raise InputError(f'UNet: norm must be None or "group", got {norm!r}.')
        self.sigmoid = bool(sigmoid)
        with random_state_kept():
            torch.manual_seed(seed)
            self.inc = _block(1, widths[0], norm, 2)
            self.down = nn.ModuleList(_down(a, b, norm) for a, b in pairwise(widths))
            levels = range(len(widths) - 2, -1, -1)  # from the lowest resolution up
            self.up = nn.ModuleList(_Up(widths[i + 1], widths[i], widths[i], beside[i], norm) for i in levels)
            self.out = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.inc(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        h = levels.pop()
        for up in self.up:
            h = up(h, levels.pop())
        h = self.out(h)
        return torch.sigmoid(h.clamp(-_SATURATED, _SATURATED)) if self.sigmoid else h

    def prior_blocks(self) -> dict[str, list[str]]:
        """The weights that share a prior: those of each block's 3 × 3 convolutions, of each skip, of the output."""
        found: dict[str, list[str]] = {}
        for name, parameter in self.named_parameters():
            if parameter.ndim == 4:
                block = ".".join(name.split(".")[: 2 if name.startswith(("down", "up")) else 1])
                found.setdefault(f"{block}.skip" if ".skip." in name else block, []).append(name)
        return found


class _Up(nn.Module):
    """Twice the resolution, joined with what the level above has kept, then two convolutions."""

    def __init__(self, below: int, above: int, out: int, skip: int, norm: str | None) -> None:
        super().__init__()
        self.skip = _layers([nn.Conv2d(above, skip, 1)], skip, norm, 1) if skip else None
        joined = below + max(skip, 1)  # without a skip connection a channel of zeros stands for it
        self.first = nn.GroupNorm(gcd(2, joined), joined) if norm else nn.Identity()
        self.convolutions = nn.Sequential(_block(joined, out, norm, 2), _block(out, out, norm, 2))

    def forward(self, below: Tensor, above: Tensor) -> Tensor:
        below = F.interpolate(below, scale_factor=2, mode="bilinear", align_corners=True)
        beside = above[:, :1] * 0 if self.skip is None else self.skip(above)
        size = min(below.shape[-2], beside.shape[-2]), min(below.shape[-1], beside.shape[-1])
        return self.convolutions(self.first(torch.cat([_centre(below, size), _centre(beside, size)], dim=1)))


def _block(fan_in: int, fan_out: int, norm: str | None, groups: int, stride: int = 1) -> nn.Sequential:
    return _layers([nn.Conv2d(fan_in, fan_out, 3, stride, 1)], fan_out, norm, groups)


def _down(fan_in: int, fan_out: int, norm: str | None) -> nn.Sequential:
    return nn.Sequential(_block(fan_in, fan_out, norm, 4, stride=2), _block(fan_out, fan_out, norm, 4))


def _layers(layers: list[nn.Module], channels: int, norm: str | None, groups: int) -> nn.Sequential:
    normalised = [nn.GroupNorm(gcd(groups, channels), channels)] if norm else []
    return nn.Sequential(*layers, *normalised, nn.LeakyReLU(_SLOPE))


def _centre(x: Tensor, size: tuple[int, int]) -> Tensor:
    top, left = (x.shape[-2] - size[0]) // 2, (x.shape[-1] - size[1]) // 2
    return x[..., top : top + size[0], left : left + size[1]]


def _widths(channels: Any, scales: Any) -> tuple[int, ...]:
    if scales is not None and (isinstance(scales, bool) or not isinstance(scales, int)):
        raise InputTypeError(f"UNet: scales must be a whole number of levels, got {scales!r}.")
    given = None if isinstance(channels, int) else len(channels)
    n = given or 3 if scales is None else scales
    if n < 1:
        raise InputError(f"UNet: at least one scale is needed, got {n}.")
    return _repeated("channels", channels, n, least=1)


def _repeated(what: str, values: Any, n: int, *, least: int) -> tuple[int, ...]:
    """One number for each of n, or n numbers."""
    many = (values,) * n if isinstance(values, int) and not isinstance(values, bool) else tuple(values)
    if len(many) != n:
        raise InputError(f"UNet: {what} must be one number or {n}, one for each; got {len(many)}: {values!r}.")
    if any(isinstance(v, bool) or not isinstance(v, int) or v < least for v in many):
        raise InputError(f"UNet: {what} must be whole numbers of at least {least}, got {values!r}.")
    return many
