"""The six workloads: a network, training data in batches, and test inputs, all reproducible.

Data are random, and weights are random or briefly trained: time and memory depend on neither. Nothing is downloaded,
and only torch is imported, so that other libraries can be measured on the same networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Workload:
    """A network with training data and test inputs."""

    name: str
    described: str
    model: nn.Module
    batches: Batches
    x: Tensor
    likelihood: str = "classification"
    loss: Loss = field(default=lambda f, y: F.cross_entropy(f, y, reduction="sum"))

    def gradient_epoch(self) -> None:
        """One forward and backward pass over the training batches."""
        for x, y in self.batches:
            self.model.zero_grad(set_to_none=True)
            self.loss(self.model(x), y).backward()
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def forward(self) -> None:
        """One forward pass over the test inputs."""
        self.model(self.x)

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def with_data(self, n: int) -> Workload:
        """The same with n random data of the same kind."""
        x, y = self.batches[0]
        generator = torch.Generator().manual_seed(n)
        X = torch.rand(n, *x.shape[1:], generator=generator)
        if y.is_floating_point():
            Y = torch.rand(n, *y.shape[1:], generator=generator)
        else:
            Y = torch.randint(int(max(y.max() for _, y in self.batches)) + 1, (n,), generator=generator)
        return replace(self, batches=list(zip(X.split(128), Y.split(128), strict=True)))

    def smaller(self, n: int) -> Workload:
        """The same with one batch of n data and n test inputs: only to test that a case runs."""
        x, y = self.batches[0]
        return Workload(self.name, self.described, self.model, [(x[:n], y[:n])], self.x[:n], self.likelihood, self.loss)


def build(name: str) -> Workload:
    """A workload by name, W1 … W6. Restores torch's global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WORKLOADS[name]()


def _w1() -> Workload:
    X = torch.linspace(-2, 2, 1000)[:, None]
    Y = torch.sin(3 * X) + 0.1 * torch.randn(1000, 1)
    model = mlp([1, 50, 50, 1], nn.Tanh)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        ((model(X) - Y) ** 2).mean().backward()
        optimiser.step()
    batches = list(zip(X.split(128), Y.split(128), strict=True))
    x = torch.linspace(-3, 3, 256)[:, None]
    return Workload("W1", "MLP 1-50-50-1, tanh", model.eval(), batches, x, "regression", _squares)


def _w2() -> Workload:
    return _classifier("W2", "MLP 784-1024-512-10, tanh", mlp([784, 1024, 512, 10], nn.Tanh), (784,), 2048)


def _w3() -> Workload:
    return _classifier("W3", "CNN, 3 convolutions and 3 dense layers, 28 × 28", cnn(), (1, 28, 28), 512)


def _w4() -> Workload:
    return _classifier("W4", "ResNet-20 with BatchNorm, 32 × 32 × 3", ResNet20(), (3, 32, 32), 256)


def _w5() -> Workload:
    return _classifier(
        "W5", "ViT of plain nn.Linear layers, 64 tokens", ViT(PlainAttention, affine=False), (3, 32, 32), 256
    )


def _w5_mha() -> Workload:
    model = ViT(TorchAttention, affine=True)
    return _classifier("W5-mha", "ViT with nn.MultiheadAttention, 64 tokens", model, (3, 32, 32), 256)


def _w6() -> Workload:
    # The frozen body's features are precomputed, as in practice; only the last layer remains.
    model = nn.Sequential(nn.Identity(), nn.Linear(2048, 1000))
    return _classifier("W6", "last layer 2048 → 1000 on given features", model, (2048,), 4096, n_classes=1000)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "W1": _w1,
    "W2": _w2,
    "W3": _w3,
    "W4": _w4,
    "W5": _w5,
    "W5-mha": _w5_mha,
    "W6": _w6,
}


def _classifier(
    name: str, described: str, model: nn.Module, shape: tuple[int, ...], n: int, *, n_classes: int = 10
) -> Workload:
    X, Y = torch.rand(n, *shape), torch.randint(n_classes, (n,))
    with torch.no_grad():
        model.train()(X[:128])  # sets the running statistics of BatchNorm
    batches = list(zip(X.split(128), Y.split(128), strict=True))
    return Workload(name, described, model.eval(), batches, torch.rand(256, *shape))


def _squares(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y) ** 2).sum()


def mlp(widths: list[int], activation: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """The Fashion-MNIST network of Immer et al. (2021): 892,010 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        *(nn.Flatten(), nn.Linear(1152, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 10)),
    )


class ResidualBlock(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet20(nn.Sequential):
    """Three stages of three residual blocks, 16, 32 and 64 channels: about 272,000 parameters."""

    def __init__(self) -> None:
        stages = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        blocks = [ResidualBlock(i if k == 0 else o, o, s if k == 0 else 1) for i, o, s in stages for k in range(3)]
        stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class PlainAttention(nn.Module):
    """Self-attention made of linear layers, so that hooks see all of them."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class TorchAttention(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, n_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class TransformerBlock(nn.Module):
    def __init__(self, attention: Callable[[int, int], nn.Module], width: int, *, affine: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=affine)
        self.attention = attention(width, 4)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=affine)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches of 4 × 4, width 128, five blocks: about a million parameters.

    With affine norms the positions are learnt as well, as usual. Without, all parameters are weights of linear and
    convolutional layers, which is what other libraries support.
    """

    def __init__(self, attention: Callable[[int, int], nn.Module], *, affine: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, 4)
        positions = 0.02 * torch.randn(1, 64, 128)
        if affine:
            self.positions = nn.Parameter(positions)
        else:
            self.register_buffer("positions", positions)
        self.blocks = nn.Sequential(*(TransformerBlock(attention, 128, affine=affine) for _ in range(5)))
        self.norm = nn.LayerNorm(128, elementwise_affine=affine)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(tokens)).mean(1))
