"""A zoo of tiny networks in float64: the shapes, layers and habits a curvature library meets in the wild.

Every case is deterministic, small (about 150 parameters at most) and treats the rows of a batch independently
in eval mode. The note says which trap the case sets.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oracle import outputs, site_index, slice_x

__all__ = ["CASES", "Case", "StepFunction", "by_name", "over_architectures", "slice_x"]

Inputs = Callable[[int, torch.Generator], Any]


@dataclass(frozen=True)
class Case:
    """One architecture with the inputs, likelihood and targets that go with it."""

    name: str
    kind: str  # gaussian, categorical, bernoulli, poisson or hetero: the oracle's words
    datum_shape: tuple[int, ...]  # what the model gives for one datum, batch axis left out
    build: Callable[[], nn.Module]
    inputs: Inputs
    class_axis: int = -1  # counted on the model's output, batch axis included
    n: int = 4  # how many data a test should use
    seed: int = 0
    note: str = ""

    def make_model(self) -> nn.Module:
        """Fresh, in eval mode; every parameter nudged so that no zero bias or unit scale hides a mistake."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()) + self.seed)
            model = self.build().double().eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.2 * torch.randn_like(p))
                for m in model.modules():
                    if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.padding_idx is not None:
                        m.weight[m.padding_idx] = 0.0  # never trained: autograd gives that row no gradient
        return model

    def make_x(self, n: int, seed: int = 0) -> Any:
        return self.inputs(n, self._generator(seed))

    def make_y(self, n: int, f: Any, seed: int = 0) -> Tensor:
        """Targets as a user would give them, for outputs f (a tensor of n data, or an object with `.logits`)."""
        g = self._generator(seed + 1)
        f = getattr(f, "logits", f).detach().reshape(n, *self.datum_shape)
        noise = torch.randn(f.shape, generator=g, dtype=f.dtype)
        if self.kind == "gaussian":
            return f + 0.5 * noise
        if self.kind == "bernoulli":
            return (noise > 0).to(f.dtype)
        if self.kind == "poisson":
            return torch.poisson(f.exp(), generator=g)
        if self.kind == "hetero":
            return noise[..., 0]
        return torch.randint(self.index.shape[1], self._site_shape(n), generator=g)

    @property
    def index(self) -> Tensor:
        """(T, C): the flat position of every term's outputs."""
        return site_index(self.datum_shape, self.class_axis)

    @property
    def word(self) -> str | None:
        """The front door's word for the likelihood; None where there is no word, only an object."""
        words = {"gaussian": "regression", "categorical": "classification", "poisson": "count"}
        binary = "binary" if self.index.shape[1] == 1 else "multilabel"
        return binary if self.kind == "bernoulli" else words.get(self.kind)

    def flat_outputs(self, model: nn.Module, x: Any) -> Tensor:
        with torch.no_grad():
            return outputs(model, x)

    def _site_shape(self, n: int) -> tuple[int, ...]:
        return tuple(torch.empty(n, *self.datum_shape).select(self.class_axis, 0).shape)

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + 1000 * seed + 1)


# --- inputs -------------------------------------------------------------------------------------------------


def floats(*shape: int) -> Inputs:
    return lambda n, g: torch.randn(n, *shape, generator=g, dtype=torch.float64)


def tokens(vocabulary: int, *shape: int) -> Inputs:
    return lambda n, g: torch.randint(vocabulary, (n, *shape), generator=g)


def several(*parts: Inputs) -> Inputs:
    """Positional arguments."""
    return lambda n, g: tuple(part(n, g) for part in parts)


def named(**parts: Inputs) -> Inputs:
    """Keyword arguments."""
    return lambda n, g: {name: part(n, g) for name, part in parts.items()}


def mask(length: int) -> Inputs:
    """Ones followed by zeros, never empty."""
    return lambda n, g: (torch.arange(length) < torch.randint(1, length + 1, (n, 1), generator=g)).long()


# --- building blocks ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Named children (modules or parameters) and a forward given as a function of the module and its inputs."""

    def __init__(self, run: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.run = run
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def pooled(*layers: nn.Module, channels: int, c: int) -> nn.Module:
    """Layers, then a tanh, a mean over everything but the channels, and a linear head."""
    return Net(
        lambda m, x: m.head(m.body(x).tanh().flatten(2).mean(-1)),
        body=nn.Sequential(*layers),
        head=nn.Linear(channels, c),
    )


def flattened(*layers: nn.Module, features: int, c: int) -> nn.Module:
    """Layers, then a tanh and a linear head on all they give, so that positions stay distinguishable."""
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, c))


def padded(mode: Any) -> nn.Module:
    return flattened(nn.Conv2d(1, 2, 3, stride=2, padding=(1, 2), padding_mode=mode), features=12, c=2)


def with_statistics(norm: nn.Module) -> nn.Module:
    """Running statistics of a network that has seen data: not zero and one."""
    norm.running_mean = torch.randn_like(norm.running_mean)  # type: ignore[arg-type]
    norm.running_var = 0.5 + torch.rand_like(norm.running_var)  # type: ignore[arg-type]
    return norm


class ScaledLinear(nn.Linear):
    """A Linear by type only."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * F.linear(x, self.weight**2, self.bias)


class StandardisedConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, w / w.flatten(1).std(1)[:, None, None, None], self.bias)


class Cube(torch.autograd.Function):
    """x³ / 3, with a backward of its own and no rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3 / 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x**2


class Closure(nn.Module):
    """Keeps a function that remembers this very object: a deep copy would compute with the original's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.transform = lambda x: self.fc(x).tanh() + self.fc.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(x)


class Tied(nn.Module):
    """Token embedding and output layer share one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.mix = nn.Linear(3, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.mix(self.embed(ids)).tanh())


class LateParameters(nn.Module):
    """Registered in another order than used; own parameters come first in `named_parameters` all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.z_out = nn.Linear(3, 2)
        self.a_in = nn.Linear(2, 3)
        self.shift = weights(3)
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.z_out((self.gain * self.a_in(x) + self.shift).tanh())


class Counter(nn.Module):
    """Writes to a buffer and draws a random number at every call; neither changes what it computes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(2)
        return self.fc(x).tanh()


class StepFunction(nn.Module):
    """f = 5 tanh(w x + b), one (B,) logit: a posterior that is far from Gaussian."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.6))
        self.b = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return 5 * (self.w * x + self.b).tanh()


class Encoder(nn.Module):
    """Called with names, masks its mean, answers with an object."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        m = attention_mask[..., None].to(self.embed.weight.dtype)
        h = (self.embed(input_ids) * m).sum(1) / m.sum(1)
        return SimpleNamespace(loss=None, logits=self.head(h.tanh()))


def mlp(i: int, hidden: int, o: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(i, hidden), activation(), nn.Linear(hidden, o))


def residual() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        for block in m.blocks:
            h = h + block(h)
        return m.last(h)

    blocks = nn.ModuleList(mlp(3, 3, 3) for _ in range(4))
    return Net(run, first=nn.Linear(2, 3), blocks=blocks, last=nn.Linear(3, 3))


def attention(**options: Any) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = x if m.attn.batch_first else x.transpose(0, 1)
        h = m.attn(h, h, h, need_weights=False)[0]
        return m.head((h if m.attn.batch_first else h.transpose(0, 1)).mean(1))

    return Net(run, attn=nn.MultiheadAttention(4, 2, **options), head=nn.Linear(4, 2))


def causal_attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, 1, 4)).transpose(1, 3).unbind(2)
        return m.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))

    return Net(run, qkv=nn.Linear(4, 12), head=nn.Linear(4, 3))


def plain_attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        scores = m.q(x) @ m.k(x).mT / 3**0.5
        return m.head((scores.softmax(-1) @ m.v(x)).tanh().mean(1))

    return Net(run, q=nn.Linear(2, 3), k=nn.Linear(2, 3), v=nn.Linear(2, 3), head=nn.Linear(3, 2))


def encoder_layer(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.1, batch_first=True, norm_first=norm_first)
    return Net(lambda m, x: m.head(m.layer(x).mean(1)), layer=layer, head=nn.Linear(4, 2))


def recurrent(cell: nn.Module, features: int) -> nn.Module:
    return Net(lambda m, x: m.head(m.rnn(x)[0].mean(1)), rnn=cell, head=nn.Linear(features, 2))


def unrolled_cell() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        state = (x.new_zeros(len(x), 2), x.new_zeros(len(x), 2))
        for x_t in x.unbind(1):
            state = m.cell(x_t, state)
        return m.head(state[0])

    return Net(run, cell=nn.LSTMCell(2, 2), head=nn.Linear(2, 2))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))


def same_even() -> nn.Module:
    model = flattened(nn.Conv1d(2, 2, 4, padding="same"), features=10, c=2)
    with warnings.catch_warnings():  # torch says once per process that it copies the input: let it say so here
        warnings.simplefilter("ignore")
        model(torch.zeros(1, 2, 5))
    return model


def frozen_first() -> nn.Module:
    model = mlp(3, 4, 2)
    model[0].requires_grad_(False)
    return model


def frozen_weights() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    for frozen in (model[0].weight, model[2].bias):
        frozen.requires_grad_(False)
    return model


def alias() -> nn.Module:
    fc = nn.Linear(3, 3)
    return nn.Sequential(fc, nn.Tanh(), fc, nn.Tanh(), nn.Linear(3, 2))


def branching() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return torch.stack([m.up(row) if row.sum() > 0 else m.down(row).tanh() for row in x])

    return Net(run, up=nn.Linear(3, 2), down=nn.Linear(3, 2))


def nested() -> nn.Module:
    branches = nn.ModuleDict(
        {"left": nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]), "right": nn.Sequential(mlp(2, 2, 2), nn.Tanh())}
    )

    def run(m: Any, x: Tensor) -> Tensor:
        left = x
        for layer in m.branches["left"]:
            left = layer(left)
        return m.out(left * m.branches["right"](x))

    return Net(run, branches=branches, out=nn.Linear(2, 2))


def checkpointed() -> nn.Module:
    block = mlp(3, 3, 3)
    return Net(lambda m, x: m.out(checkpoint(m.block, x, use_reentrant=False)), block=block, out=nn.Linear(3, 2))


def deep_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))


# --- the zoo ------------------------------------------------------------------------------------------------

CASES: list[Case] = []


def add(name: str, kind: str, shape: tuple[int, ...], build: Callable[[], nn.Module], x: Inputs, **rest: Any) -> None:
    CASES.append(Case(name, kind, shape, build, x, **rest))


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# Plain networks and output shapes.
add("mlp-tanh", "gaussian", (3,), lambda: mlp(3, 4, 3), floats(3), n=7)
add("mlp-relu", "categorical", (3,), lambda: mlp(2, 5, 3, nn.ReLU), floats(2), n=9, seed=5)
add("mlp-no-bias", "gaussian", (2,), lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(),
    nn.Linear(4, 2, bias=False)), floats(3))  # fmt: skip
add("one-output-column", "gaussian", (1,), lambda: mlp(2, 4, 1), floats(2), note="(B, 1)")
add("one-output-flat", "gaussian", (), lambda: Net(lambda m, x: m.f(x).squeeze(-1), f=mlp(2, 4, 1)), floats(2),
    note="(B,)")  # fmt: skip
add("one-logit", "bernoulli", (1,), lambda: mlp(2, 4, 1), floats(2), n=8)
add("squeeze-everything", "bernoulli", (), lambda: Net(lambda m, x: m.f(x).squeeze(), f=mlp(2, 3, 1)), floats(2),
    note="a batch of one comes out as a scalar")  # fmt: skip
add("one-datum", "categorical", (3,), lambda: mlp(3, 4, 3), floats(3), n=1, note="Kronecker blocks exact; H of rank 2")
add("deep-residual", "categorical", (3,), residual, floats(2))
add("deep-linear", "gaussian", (2,), deep_linear, floats(3), n=8, note="Kronecker blocks exact")
add("in-place-residual", "gaussian", (3,), lambda: Net(lambda m, x: m.b(m.a(x).add_(x).tanh_()), a=nn.Linear(3, 3),
    b=nn.Linear(3, 3)), floats(3), note="the output of `a` is overwritten")  # fmt: skip
add("in-place-relu", "categorical", (2,), lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True),
    nn.Linear(4, 2)), floats(3), n=6, seed=1, note="a captured layer output is overwritten")  # fmt: skip
add("dropout", "categorical", (2,), lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(),
    nn.Linear(4, 2)), floats(3), note="eval mode")  # fmt: skip
add("functional-dropout", "gaussian", (2,), lambda: Net(lambda m, x: m.b(F.dropout(m.a(x).tanh(), 0.5, m.training)),
    a=nn.Linear(3, 3), b=nn.Linear(3, 2)), floats(3))  # fmt: skip

# Likelihoods and structured outputs.
add("multilabel", "bernoulli", (3,), lambda: mlp(3, 3, 3), floats(3), n=6)
add("count", "poisson", (2,), lambda: mlp(2, 3, 2), floats(2), n=6)
add("count-flat", "poisson", (), lambda: Net(lambda m, x: m.f(x)[:, 0], f=mlp(2, 3, 1)), floats(2), n=6)
add("heteroscedastic", "hetero", (2,), lambda: mlp(2, 4, 2), floats(2), n=6)
add("step-function", "bernoulli", (), StepFunction, floats(), n=6, note="a batch is (B,); scalar parameters")
add("sequence-output", "categorical", (4, 3), lambda: mlp(2, 4, 3), floats(4, 2), note="(B, T, C)")
add("sequence-regression", "gaussian", (3, 2), lambda: mlp(2, 4, 2), floats(3, 2))
add("image-output", "categorical", (3, 2, 3), lambda: nn.Conv2d(2, 3, 3, padding=1), floats(2, 2, 3), class_axis=1,
    note="(B, C, H, W)")  # fmt: skip
add("image-regression", "gaussian", (1, 3, 3), lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(),
    nn.Conv2d(2, 1, 3, padding=1)), floats(1, 3, 3), class_axis=1)  # fmt: skip

# Convolutions.
add("conv1d-stride", "gaussian", (2,), lambda: flattened(nn.Conv1d(2, 3, 3, stride=2, padding=1), features=9, c=2),
    floats(2, 6))  # fmt: skip
add("conv1d-circular-dilated", "categorical", (2,), lambda: flattened(nn.Conv1d(2, 2, 3, padding=2, dilation=2,
    padding_mode="circular"), features=10, c=2), floats(2, 5))  # fmt: skip
add("conv2d-stride", "categorical", (2,), lambda: flattened(nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0)),
    features=18, c=2), floats(2, 4, 4))  # fmt: skip
add("conv2d-no-bias", "gaussian", (2,), lambda: pooled(nn.Conv2d(1, 2, 2, bias=False), nn.ReLU(),
    nn.Conv2d(2, 3, 2, bias=False), channels=3, c=2), floats(1, 4, 4))  # fmt: skip
for mode in ("reflect", "replicate", "circular"):
    add(f"conv2d-{mode}", "gaussian", (2,), partial(padded, mode), floats(1, 4, 4))
add("conv2d-groups", "categorical", (3,), lambda: pooled(nn.Conv2d(4, 4, 2, groups=2), channels=4, c=3),
    floats(4, 3, 3))  # fmt: skip
add("conv2d-depthwise", "gaussian", (2,), lambda: pooled(nn.Conv2d(3, 6, 3, groups=3, padding=1), nn.Conv2d(6, 3, 1),
    channels=3, c=2), floats(3, 3, 3))  # fmt: skip
add("conv2d-same", "gaussian", (2,), lambda: flattened(nn.Conv2d(1, 2, (2, 3), padding="same", dilation=(2, 1)),
    features=18, c=2), floats(1, 3, 3))  # fmt: skip
add("conv1d-same-even", "gaussian", (2,), same_even,
    floats(2, 5), note="one more zero on the right than on the left")  # fmt: skip
add("conv1d-same-circular", "gaussian", (2,), lambda: flattened(nn.Conv1d(2, 2, 4, padding="same",
    padding_mode="circular"), features=10, c=2), floats(2, 5))  # fmt: skip
add("conv3d", "gaussian", (2,), lambda: pooled(nn.Conv3d(2, 2, (2, 1, 2), stride=(1, 2, 1), padding=(0, 1, 0)),
    channels=2, c=2), floats(2, 3, 3, 2))  # fmt: skip
add("conv3d-same-groups", "categorical", (2,), lambda: flattened(nn.Conv3d(2, 2, (2, 1, 3), padding="same", groups=2,
    dilation=(1, 1, 2), padding_mode="replicate"), features=12, c=2), floats(2, 2, 1, 3))  # fmt: skip
add("conv1d-valid", "gaussian", (2,), lambda: flattened(nn.Conv1d(2, 2, 2, padding="valid", dilation=2, stride=2),
    features=4, c=2), floats(2, 6), note="the last column of the input is never seen")  # fmt: skip
add("conv-transpose1d", "gaussian", (2,), lambda: flattened(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1,
    output_padding=1), features=18, c=2), floats(2, 3))  # fmt: skip
add("conv-transpose2d-groups", "gaussian", (2,), lambda: pooled(nn.ConvTranspose2d(4, 6, (2, 3), stride=2, padding=1,
    output_padding=(1, 0), groups=2, dilation=(2, 1)), channels=6, c=2), floats(4, 2, 3))  # fmt: skip
add("conv-transpose3d", "categorical", (2,), lambda: flattened(nn.ConvTranspose3d(2, 1, (2, 1, 3), stride=(2, 1, 2),
    padding=(1, 1, 2), output_padding=(1, 0, 1), dilation=(1, 1, 2)), features=12, c=2), floats(2, 2, 3, 2),
    note="padding beyond the kernel crops the input")  # fmt: skip
add("conv-transpose1d-groups", "gaussian", (2,), lambda: flattened(nn.ConvTranspose1d(4, 2, 3, groups=2, bias=False),
    features=10, c=2), floats(4, 3))  # fmt: skip
add("conv-flattened-time", "categorical", (2,), lambda: Net(
    lambda m, x: m.out(m.conv(x.flatten(0, 1)).tanh().reshape(len(x), 3, -1).mean(1)), conv=nn.Conv2d(1, 2, 2),
    out=nn.Linear(8, 2)), floats(3, 1, 3, 3), note="(B·T, C, H, W) inside")  # fmt: skip
add("conv2d-standardised", "gaussian", (2,), lambda: pooled(StandardisedConv2d(2, 3, 2), channels=3, c=2),
    floats(2, 3, 3), note="a Conv2d subclass with a forward of its own")  # fmt: skip
add("pool-and-flatten", "categorical", (3,), lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(8, 3)), floats(1, 5, 5))  # fmt: skip

# Normalisation and activation with parameters.
add("batch-norm1d", "categorical", (2,), lambda: nn.Sequential(nn.Linear(3, 4), with_statistics(nn.BatchNorm1d(4)),
    nn.Tanh(), nn.Linear(4, 2)), floats(3))  # fmt: skip
add("batch-norm2d", "gaussian", (2,), lambda: pooled(nn.Conv2d(1, 3, 2), with_statistics(nn.BatchNorm2d(3)),
    channels=3, c=2), floats(1, 3, 3))  # fmt: skip
add("batch-norm1d-sequence", "categorical", (2,), lambda: pooled(nn.Conv1d(2, 3, 2),
    with_statistics(nn.BatchNorm1d(3)), channels=3, c=2), floats(2, 4), note="(B, C, L)")  # fmt: skip
add("layer-norm", "gaussian", (2,), lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    floats(3))  # fmt: skip
add("layer-norm-no-bias", "categorical", (2,), lambda: Net(lambda m, x: m.out(m.norm(m.fc(x)).mean(1)),
    fc=nn.Linear(2, 4), norm=nn.LayerNorm((3, 4), bias=False), out=nn.Linear(4, 2)), floats(3, 2),
    note="over two axes")  # fmt: skip
add("layer-norm-two-axes", "gaussian", (2,), lambda: Net(
    lambda m, x: m.out(m.norm(m.conv(x)).tanh().mean((1, 2, 3))[:, None]), conv=nn.Conv2d(1, 2, 2),
    norm=nn.LayerNorm((2, 3)), out=nn.Linear(1, 2)), floats(1, 3, 4), note="the channels are positions")  # fmt: skip
add("rms-norm", "gaussian", (2,), lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 2)), floats(3))
add("group-norm", "categorical", (2,), lambda: pooled(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), channels=4, c=2),
    floats(2, 5))  # fmt: skip
add("group-norm-flat", "gaussian", (2,), lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Tanh(),
    nn.Linear(4, 2)), floats(3), note="(B, C)")  # fmt: skip
add("instance-norm", "gaussian", (2,), lambda: pooled(nn.Conv2d(1, 3, 2), nn.InstanceNorm2d(3, affine=True),
    channels=3, c=2), floats(1, 4, 4))  # fmt: skip
add("instance-norm-statistics", "categorical", (2,), lambda: pooled(nn.Conv1d(2, 3, 2), with_statistics(
    nn.InstanceNorm1d(3, affine=True, track_running_stats=True)), channels=3, c=2), floats(2, 4))  # fmt: skip
add("prelu", "gaussian", (2,), lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2), nn.PReLU()),
    floats(3))  # fmt: skip
add("prelu-channels", "categorical", (2,), lambda: pooled(nn.Conv2d(1, 3, 2), nn.PReLU(3), nn.PReLU(), channels=3, c=2),
    floats(1, 3, 3))  # fmt: skip

# Tokens, attention, recurrence.
add("embedding-padding", "categorical", (2,), lambda: Net(lambda m, i: m.out(m.embed(i).sum(1).tanh()),
    embed=nn.Embedding(5, 3, padding_idx=0), out=nn.Linear(3, 2)), tokens(5, 4))  # fmt: skip
add("embedding-bag", "categorical", (3,), lambda: nn.Sequential(nn.EmbeddingBag(6, 3, mode="mean"), nn.Tanh(),
    nn.Linear(3, 3)), tokens(6, 4))  # fmt: skip
add("embedding-bag-weighted", "gaussian", (2,), lambda: Net(lambda m, i, w: m.out(m.bag(i, per_sample_weights=w)),
    bag=nn.EmbeddingBag(5, 3, mode="sum"), out=nn.Linear(3, 2)), several(tokens(5, 3), floats(3)))  # fmt: skip
add("attention-batch-first", "categorical", (2,), lambda: attention(batch_first=True), floats(3, 4))
add("attention-sequence-first", "gaussian", (2,), lambda: attention(add_bias_kv=True), floats(3, 4),
    note="batch on axis 1 inside; bias rows appended to keys and values")  # fmt: skip
add("attention-causal", "categorical", (3, 3), causal_attention, floats(3, 4), note="fused attention, packed q, k, v")
add("attention-plain", "categorical", (2,), plain_attention, floats(3, 2),
    note="the bias of the keys has no effect: its gradient is rounding")  # fmt: skip
add("encoder-post-norm", "categorical", (2,), lambda: encoder_layer(norm_first=False), floats(3, 4))
add("encoder-pre-norm", "gaussian", (2,), lambda: encoder_layer(norm_first=True), floats(3, 4))
add("lstm", "categorical", (2,), lambda: recurrent(nn.LSTM(2, 3, batch_first=True), 3), floats(4, 2))
add("lstm-bidirectional", "gaussian", (2,), lambda: recurrent(nn.LSTM(2, 2, batch_first=True, bidirectional=True), 4),
    floats(3, 2))  # fmt: skip
add("gru", "categorical", (2,), lambda: recurrent(nn.GRU(2, 3, batch_first=True), 3), floats(4, 2))
add("rnn-two-layers", "gaussian", (2,), lambda: recurrent(nn.RNN(2, 3, num_layers=2, batch_first=True), 3),
    floats(4, 2))  # fmt: skip
add("lstm-cell", "gaussian", (2,), unrolled_cell, floats(3, 2), note="one module, called once per step")

# Shared, reused, hidden and idle parameters.
add("tied-weights", "categorical", (3, 5), Tied, tokens(5, 3))
add("reused-module", "gaussian", (2,), lambda: Net(lambda m, x: m.out(m.fc(m.fc(x).tanh()).tanh()), fc=nn.Linear(3, 3),
    out=nn.Linear(3, 2)), floats(3), note="called twice")  # fmt: skip
add("two-shapes", "gaussian", (3,), lambda: Net(lambda m, a, b: m.fc(a) + m.fc(b).tanh().mean(1), fc=nn.Linear(2, 3)),
    several(floats(2), floats(4, 2)), note="one module on (B, I) and on (B, T, I)")  # fmt: skip
add("alias", "gaussian", (2,), alias, floats(3), note="one module under two names")
add("raw-parameters", "gaussian", (2,), lambda: Net(lambda m, x: (x @ m.w).tanh() @ m.v * m.s + m.b, w=weights(3, 3),
    v=weights(3, 2), s=weights(), b=weights(2)), floats(3))  # fmt: skip
add("parameter-list", "gaussian", (2,), lambda: Net(lambda m, x: (x @ m.ws[0]).sin() @ m.ws[1] + m.d["b"],
    ws=nn.ParameterList([weights(3, 3), weights(3, 2)]), d=nn.ParameterDict({"b": weights(2)})), floats(3))  # fmt: skip
add("weight-norm", "categorical", (2,), lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    nn.Tanh(), nn.Linear(3, 2)), floats(3), note="by parametrisation")  # fmt: skip
add("weight-norm-hook", "gaussian", (2,), old_weight_norm, floats(3), note="by a forward hook; cannot be deep-copied")
add("spectral-norm", "gaussian", (2,), lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    nn.Tanh(), nn.Linear(3, 2)), floats(3), note="eval: no power iteration")  # fmt: skip
add("frozen-first-layer", "categorical", (2,), frozen_first, floats(3))
add("frozen-weights", "gaussian", (2,), frozen_weights, floats(3), note="biases only, and one weight without its bias")
add("unused-parameters", "gaussian", (2,), lambda: Net(lambda m, x: m.used(x).tanh(), idle=nn.Linear(2, 2),
    used=nn.Linear(3, 2), spare=weights(3)), floats(3), note="zero curvature, prior only")  # fmt: skip
add("late-parameters", "categorical", (2,), LateParameters, floats(2))
add("called-by-keyword", "gaussian", (2,), lambda: Net(lambda m, x: m.b(input=m.a(input=x).tanh()), a=nn.Linear(3, 3),
    b=nn.Linear(3, 2)), floats(3), note="forward hooks see no positional input")  # fmt: skip
add("never-called", "gaussian", (2,), lambda: Net(lambda m, x: F.linear(x, m.a.weight, m.a.bias).tanh() @ m.b.weight.T,
    a=nn.Linear(3, 3), b=nn.Linear(3, 2, bias=False)), floats(3), note="no hook fires")  # fmt: skip
add("weight-used-outside", "gaussian", (3,), lambda: Net(lambda m, x: F.linear(m.fc(x).tanh(), m.fc.weight.T),
    fc=nn.Linear(3, 3)), floats(3), note="hooks see only half of what the weight does")  # fmt: skip
add("linear-subclass", "categorical", (2,), lambda: nn.Sequential(ScaledLinear(3, 3), nn.Tanh(), nn.Linear(3, 2)),
    floats(3))  # fmt: skip
add("time-first-linear", "gaussian", (2,), lambda: Net(lambda m, x: m.out(m.fc(x.transpose(0, 1)).tanh().sum(0)),
    fc=nn.Linear(2, 3), out=nn.Linear(3, 2)), floats(4, 2), note="(T, B, I) inside")  # fmt: skip
add("flattened-time", "categorical", (4, 2), lambda: Net(lambda m, x: m.f(x.reshape(-1, 2)).reshape(len(x), -1, 2),
    f=mlp(2, 3, 2)), floats(4, 2), note="(B·T, I) inside")  # fmt: skip

# Inputs, outputs and habits.
add("mapping-input", "categorical", (3,), Encoder, named(input_ids=tokens(6, 4), attention_mask=mask(4)),
    note="answers with an object holding .logits")  # fmt: skip
add("tuple-input", "gaussian", (2,), lambda: Net(lambda m, i, x: m.out((m.embed(i) + m.fc(x)).tanh()),
    embed=nn.Embedding(4, 3), fc=nn.Linear(2, 3), out=nn.Linear(3, 2)), several(tokens(4), floats(2)),
    note="integers and floats")  # fmt: skip
add("logits-object", "gaussian", (2,), lambda: Net(lambda m, x: SimpleNamespace(logits=m.f(x)), f=mlp(3, 3, 2)),
    floats(3))  # fmt: skip
add("bilinear", "gaussian", (2,), lambda: nn.Bilinear(2, 3, 2), several(floats(2), floats(3)))
add("closure", "gaussian", (2,), Closure, floats(3), note="a stored lambda remembers self")
add("branching", "categorical", (2,), branching, floats(3), n=6, note="Python control flow on each datum's values")
add("custom-function", "gaussian", (2,), lambda: Net(lambda m, x: m.b(Cube.apply(m.a(x))), a=nn.Linear(3, 3),
    b=nn.Linear(3, 2)), floats(3))  # fmt: skip
add("nested-containers", "categorical", (2,), nested, floats(2))
add("checkpointed", "gaussian", (2,), checkpointed, floats(3), note="forward runs again during the backward pass")
add("counter", "gaussian", (2,), Counter, floats(3), note="buffer and generator change at every call")


# --- for tests that take long on each -----------------------------------------------------------------------

FEW = {"mlp-relu", "one-output-flat", "sequence-output", "conv2d-stride", "batch-norm2d", "attention-batch-first",
       "gru", "tied-weights", "weight-norm", "tuple-input"}  # fmt: skip
over_architectures = pytest.mark.parametrize(
    "case",
    [case if case.name in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
