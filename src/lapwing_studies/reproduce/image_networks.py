"""Five networks of about 46,000 parameters for small grey images: with and without normalisation, one with attention.

The architectures follow Antorán et al. (2022), with smaller sizes. All accept images of 8 × 8 and of 12 × 12.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_CLASSES = 10
WIDTHS = (16, 36)


def cnn(side: int) -> nn.Module:
    """Three convolutions, no normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 46, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(46, N_CLASSES),
    )  # fmt: skip


def resnet(side: int, widths: tuple[int, int] = WIDTHS) -> nn.Module:
    """BatchNorm after every convolution."""
    small, large = widths
    stem = (_conv(1, small), nn.BatchNorm2d(small), nn.ReLU())
    blocks = (ResidualBlock(small, small, 1), ResidualBlock(small, large, 2), ResidualBlock(large, large, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(large, N_CLASSES))


def staged_resnet(side: int, widths: tuple[int, int, int], n_channels: int = 1) -> nn.Module:
    """Three stages of one block each; each stage halves the side, as in ResNet-18."""
    small, middle, large = widths
    stem = (_conv(n_channels, small, 2), nn.BatchNorm2d(small), nn.ReLU())
    blocks = (ResidualBlock(small, small, 1), ResidualBlock(small, middle, 2), ResidualBlock(middle, large, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(large, N_CLASSES))


def pre_resnet(side: int) -> nn.Module:
    """BatchNorm before every convolution, and once at the end."""
    small, large = WIDTHS
    blocks = (
        PreActivationBlock(small, small, 1),
        PreActivationBlock(small, large, 2),
        PreActivationBlock(large, large, 1),
    )
    end = (nn.BatchNorm2d(large), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(large, N_CLASSES))
    return nn.Sequential(_conv(1, small), *blocks, *end)


def fixup(side: int) -> nn.Module:
    """No normalisation: scalar biases and multipliers, the last convolution of a block and the head start at zero."""
    small, large = WIDTHS
    blocks = [FixupBlock(small, small, 1), FixupBlock(small, large, 2), FixupBlock(large, large, 1)]
    with torch.no_grad():
        for block in blocks:
            block.first.weight.mul_(len(blocks) ** -0.5)
            block.second.weight.zero_()
    head = nn.Linear(large, N_CLASSES)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(_conv(1, small), Shift(), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def transformer(side: int, *, width: int = 42, n_blocks: int = 2) -> nn.Module:
    """Sixteen patches, two pre-LayerNorm blocks of three heads, the mean over tokens."""
    patch = side // 4
    embed = nn.Sequential(nn.Conv2d(1, width, patch, patch), nn.Flatten(2), Tokens(width, (side // patch) ** 2))
    blocks = [AttentionBlock(width, 3) for _ in range(n_blocks)]
    return nn.Sequential(embed, *blocks, nn.LayerNorm(width), MeanOverTokens(), nn.Linear(width, N_CLASSES))


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "T-former": transformer,
    "CNN": cnn,
    "ResNet": resnet,
    "Pre-ResNet": pre_resnet,
    "Fixup": fixup,
}
NORMALISED = {"T-former", "ResNet", "Pre-ResNet"}


# --- their parts -------------------------------------------------------------------------------------------


def _conv(c_in: int, c_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)


def _shortcut(c_in: int, c_out: int, stride: int) -> nn.Module:
    return nn.Identity() if (c_in, stride) == (c_out, 1) else nn.Conv2d(c_in, c_out, 1, stride, bias=False)


class ResidualBlock(nn.Module):
    """ReLU(x + BN(conv(ReLU(BN(conv(x))))))."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(c_in, c_out, stride), _conv(c_out, c_out)
        self.norm_first, self.norm_second = nn.BatchNorm2d(c_out), nn.BatchNorm2d(c_out)
        self.shortcut = _shortcut(c_in, c_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_first(self.first(x)))
        return F.relu(self.shortcut(x) + self.norm_second(self.second(inner)))


class PreActivationBlock(nn.Module):
    """x + conv(ReLU(BN(conv(ReLU(BN(x))))))."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(c_in, c_out, stride), _conv(c_out, c_out)
        self.norm_first, self.norm_second = nn.BatchNorm2d(c_in), nn.BatchNorm2d(c_out)
        self.shortcut = _shortcut(c_in, c_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(F.relu(self.norm_first(x)))
        return self.shortcut(x) + self.second(F.relu(self.norm_second(inner)))


class Shift(nn.Module):
    """Adds a learnt scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Gain(nn.Module):
    """Multiplies by a learnt scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class FixupBlock(nn.Module):
    """ReLU(x + (s · conv(ReLU(conv(x + b₁) + b₂) + b₃) + b₄)), all s and b scalars."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _conv(c_in, c_out, stride), _conv(c_out, c_out)
        self.before, self.middle, self.after, self.end = Shift(), Shift(), Shift(), Shift()
        self.gain, self.shortcut = Gain(), _shortcut(c_in, c_out, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.middle(self.first(self.before(x))))
        return F.relu(self.shortcut(x) + self.end(self.gain(self.second(self.after(inner)))))


class Tokens(nn.Module):
    """(B, width, T) → (B, T, width), plus a learnt position."""

    def __init__(self, width: int, n_tokens: int) -> None:
        super().__init__()
        self.position = nn.Parameter(0.02 * torch.randn(n_tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) + self.position


class AttentionBlock(nn.Module):
    """x + attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_first, self.norm_second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm_first(x))
        return x + self.narrow(F.gelu(self.wide(self.norm_second(x))))

    def _attend(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.n_heads, -1)).transpose(-2, -3) for m in (self.query, self.key, self.value))
        # Written out because fused kernels do not support batched reverse mode over many rows.
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(-2, -3).flatten(-2))


class MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-2)
