"""Common small network architectures, with and without normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

Layer = Callable[[int], nn.Module]


def plain(width: int) -> nn.Module:
    return nn.Identity()


def groups_of_four(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def mlp(widths: Sequence[int], activation: Callable[[], nn.Module], norm: Layer = plain) -> nn.Sequential:
    """Linear → norm → activation, and a last linear layer."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), norm(fan_out), activation()]
    kept = [layer for layer in layers[:-2] if not isinstance(layer, nn.Identity)]
    return nn.Sequential(*kept)


def cnn(side: int, channels: Sequence[int], n_outputs: int, norm: Layer = plain) -> nn.Sequential:
    """3 × 3 convolution → norm → ReLU → halve, for each pair of `channels`; then one linear layer."""
    layers: list[nn.Module] = []
    for c_in, c_out in pairwise(channels):
        layers += [nn.Conv2d(c_in, c_out, 3, padding=1), norm(c_out), nn.ReLU(), nn.MaxPool2d(2)]
        side //= 2
    kept = [layer for layer in layers if not isinstance(layer, nn.Identity)]
    return nn.Sequential(*kept, nn.Flatten(), nn.Linear(side * side * channels[-1], n_outputs))


def seeded(build: Callable[[], nn.Module], *, seed: int) -> nn.Module:
    """Call `build` with torch's random state seeded, and restore the global state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
