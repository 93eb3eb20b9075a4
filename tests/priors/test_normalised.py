"""Normalised groups: which are found, on what evidence, and what a precision of their own makes invariant."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import lapwing as lw
import test_untouched
from lapwing import curvature
from lapwing.data import as_input
from lapwing.priors.normalised import find_normalised_groups, group_table, normalised_prior
from oracle import assert_close
from untouched import stir, untouched

Groups = dict[tuple[str, ...], str]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def found(model: nn.Module, x: Any) -> Groups:
    return {group.names: group.kind for group in find_normalised_groups(model, x)}


# --- networks ----------------------------------------------------------------------------------------------


class HandRMSNorm(nn.Module):
    def __init__(self, d: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class HandLayerNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.layer_norm(self.body(x), (6,)).tanh())


class Cosine(nn.Module):
    """Rows of unit length against features of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Parameter(torch.randn(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return 5 * F.normalize(self.body(x).tanh()) @ F.normalize(self.head).T


class Block(nn.Module):
    """A GPT-like block: LayerNorm before, hand-written attention, residual sums."""

    def __init__(self, d: int, norm: Callable[[int], nn.Module], qk_norm: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(d), norm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.q_norm, self.k_norm = (nn.RMSNorm(d // 2) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        n = self.norm1(h)
        q, k, v = (layer(n).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        h = h + self.o((weights @ v).transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Gpt(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, qk_norm: bool = False, tied: bool = False):
        super().__init__()
        self.token, self.place = nn.Embedding(7, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([Block(8, norm, qk_norm) for _ in range(2)])
        self.norm, self.head = norm(8), nn.Linear(8, 7, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, -1])


STREAM = (
    "token.weight",
    "place.weight",
    *(f"blocks.{i}.{layer}.{t}" for i in range(2) for layer in ("o", "down") for t in ("weight", "bias")),
)


class CastingRMSNorm(nn.Module):
    """As in the Llama family: computed in float32 whatever comes."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Vit(nn.Module):
    """Patches by a convolution, a class token, positions, and a timm-like block."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.patch, self.block = nn.Conv2d(1, 8, 4, 4), Block(8, nn.LayerNorm)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], 1) + self.places
        return self.head(self.norm(self.block(h))[:, 0])


class Bert(nn.Module):
    """The sum of embeddings is normalised; after that every norm stands behind a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place, self.norm = nn.Embedding(7, 4), nn.Embedding(6, 4), nn.LayerNorm(4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        h = self.norm(self.token(input) + self.place(torch.arange(input.shape[1])))
        return self.head(self.layer(h)[:, 0])


class Gated(nn.Module):
    """Two layers behind each other before the norm, and a learned scale on a branch (LayerScale)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(3, 6, bias=False), nn.RMSNorm(6)
        self.up, self.down, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.full((6,), 0.1))
        self.last, self.head = nn.RMSNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.head(self.last(h + self.scale * self.down(self.up(self.norm(h)).tanh())))


class Residual(nn.Module):
    def __init__(self, c: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(c, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.short = nn.Sequential(nn.Conv2d(c, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if c != o else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        return F.relu(h + (x if self.short is None else self.short(x)))


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, 1, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(2)])
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, 1, 1) for _ in range(2)])
        self.last, self.head = nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = h + conv(F.relu(norm(h)))
        return self.head(F.relu(self.last(h)).mean((-2, -1)))


class Dense(nn.Module):
    """DenseNet-like: each BatchNorm reads channels of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 3, 3, 1, 1, bias=False), nn.Conv2d(3, 2, 3, 1, 1, bias=False)
        self.b1, self.b2, self.head = nn.BatchNorm2d(3), nn.BatchNorm2d(5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.c1(x)
        h = torch.cat([h, self.c2(F.relu(self.b1(h)))], 1)
        return self.head(F.relu(self.b2(h)).mean((-2, -1)))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 6), nn.Linear(2, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(self.norm(self.left(a) + self.right(b)).tanh())


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 2))


def mlp(norm: nn.Module | None, *, bias: bool = True) -> nn.Module:
    layers = [nn.Linear(3, 6, bias=bias), norm, nn.Tanh(), nn.Linear(6, 2)]
    return nn.Sequential(*(layer for layer in layers if layer is not None))


def cnn(norm: nn.Module, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=bias), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )


def resnet() -> nn.Module:
    blocks = [Residual(4, 4), Residual(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)]
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), *blocks)


def encoder(*, norm_first: bool) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(4, 2, 6, norm_first=norm_first, batch_first=True) for _ in range(2)]
    last = [nn.LayerNorm(4)] if norm_first else []
    return nn.Sequential(nn.Linear(3, 4), *layers, *last, nn.Linear(4, 2))


ENCODER_STREAM = (
    "0.weight",
    "0.bias",
    *(f"{i}.{layer}.{t}" for i in (1, 2) for layer in ("self_attn.out_proj", "linear2") for t in ("weight", "bias")),
)


# --- what must be found -------------------------------------------------------------------------------------


def rows(n: int = 8) -> Tensor:
    return torch.randn(n, 3, generator=seeded(5))


def pictures(n: int = 8) -> Tensor:
    return torch.randn(n, 1, 8, 8, generator=seeded(5))


def as_double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def series(n: int = 8) -> Tensor:
    return torch.randn(n, 5, 3, generator=seeded(5))


def tokens(n: int = 8) -> Tensor:
    return torch.randint(7, (n, 5), generator=seeded(5))


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    x: Callable[[], Any]
    groups: Groups = field(default_factory=dict)


LAYER = ("0.weight", "0.bias")
RESNET = ["0.weight", "3.c1.weight", "3.c2.weight", "4.c1.weight", "4.c2.weight", "4.short.0.weight"]
CASES = [
    Case("plain MLP", lambda: mlp(None), rows),
    Case("plain ReLU MLP without biases", lambda: nn.Sequential(
        nn.Linear(3, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False)), rows),
    Case("LayerNorm", lambda: mlp(nn.LayerNorm(6)), rows, {LAYER: "exact"}),
    Case("LayerNorm, no bias", lambda: mlp(nn.LayerNorm(6), bias=False), rows, {("0.weight",): "exact"}),
    Case("LayerNorm without parameters", lambda: mlp(nn.LayerNorm(6, elementwise_affine=False)), rows,
         {LAYER: "exact"}),
    Case("RMSNorm", lambda: mlp(nn.RMSNorm(6)), rows, {LAYER: "exact"}),
    Case("RMSNorm by hand", lambda: mlp(HandRMSNorm(6)), rows, {LAYER: "exact"}),
    Case("LayerNorm by hand", lambda: mlp(HandLayerNorm(6)), rows, {LAYER: "exact"}),
    Case("a function", FunctionalNorm, rows, {("body.weight", "body.bias"): "exact"}),
    Case("cosine similarity", Cosine, rows, {("head",): "exact"}),
    Case("GroupNorm", lambda: cnn(nn.GroupNorm(2, 4)), pictures, {LAYER: "exact"}),
    Case("InstanceNorm", lambda: cnn(nn.InstanceNorm2d(4, affine=True)), pictures, {LAYER: "exact"}),
    Case("InstanceNorm, running", lambda: cnn(nn.InstanceNorm2d(4, track_running_stats=True)), pictures,
         {LAYER: "statistical"}),
    Case("BatchNorm MLP", lambda: mlp(nn.BatchNorm1d(6)), rows, {LAYER: "statistical"}),
    Case("BatchNorm MLP, not affine", lambda: mlp(nn.BatchNorm1d(6, affine=False)), rows, {LAYER: "statistical"}),
    Case("BatchNorm of the batch", lambda: mlp(nn.BatchNorm1d(6, track_running_stats=False)), rows, {LAYER: "exact"}),
    Case("BatchNorm CNN", lambda: cnn(nn.BatchNorm2d(4)), pictures, {LAYER: "statistical"}),
    Case("BatchNorm CNN, no bias", lambda: cnn(nn.BatchNorm2d(4), bias=False), pictures,
         {("0.weight",): "statistical"}),
    Case("ResNet", resnet, pictures, {(name,): "statistical" for name in RESNET}),
    Case("pre-activation ResNet", PreActivation, pictures, {tuple(
        f"{layer}.{t}" for layer in ("stem", "convs.0", "convs.1") for t in ("weight", "bias")): "statistical"}),
    Case("DenseNet", Dense, pictures, {("c1.weight",): "statistical", ("c2.weight",): "statistical"}),
    Case("weight_norm", lambda: nn.Sequential(weight_norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 2)), rows,
         {("0.parametrizations.weight.original1",): "exact"}),
    Case("old weight_norm", old_weight_norm, rows, {("0.weight_v",): "exact"}),
    Case("spectral_norm", lambda: nn.Sequential(spectral_norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 2)), rows,
         {("0.parametrizations.weight.original",): "exact"}),
    Case("pre-LN encoder", lambda: encoder(norm_first=True), series, {ENCODER_STREAM: "exact"}),
    Case("post-LN encoder", lambda: encoder(norm_first=False), series),
    Case("GPT", Gpt, tokens, {STREAM: "exact"}),
    Case("GPT, RMSNorm", lambda: Gpt(HandRMSNorm), tokens, {STREAM: "exact"}),
    Case("GPT, QK-norm", lambda: Gpt(qk_norm=True), tokens, {STREAM: "exact", **{
        (f"blocks.{i}.{layer}.weight", f"blocks.{i}.{layer}.bias"): "exact" for i in range(2) for layer in "qk"}}),
    Case("GPT, tied head", lambda: Gpt(tied=True), tokens),
    Case("GPT, RMSNorm in float32", lambda: Gpt(CastingRMSNorm), tokens, {STREAM: "exact"}),
    Case("ViT", Vit, pictures, {tuple(["token", "places", *(
        f"{layer}.{t}" for layer in ("patch", "block.o", "block.down") for t in ("weight", "bias"))]): "exact"}),
    Case("BERT", Bert, tokens, {("token.weight", "place.weight"): "exact"}),
    Case("LayerScale", Gated, rows, {("stem.weight", "scale"): "exact"}),
    Case("layers without biases in a row", lambda: nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 2)), rows,
        {LAYER: "exact", ("2.weight",): "exact"}),
    Case("two inputs", TwoInputs, lambda: (rows(), torch.randn(8, 2, generator=seeded(6))),
         {("left.weight", "left.bias", "right.weight", "right.bias"): "exact"}),
    Case("two inputs by keyword", TwoInputs, lambda: {"b": torch.randn(8, 2, generator=seeded(6)), "a": rows()},
         {("left.weight", "left.bias", "right.weight", "right.bias"): "exact"}),
]  # fmt: skip


def made(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """With running statistics that are nobody's default."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = build()
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
    return model.to(dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_groups_are_found_and_the_model_is_untouched(case: Case):
    model = made(case.build)
    stir()
    with untouched(model):
        groups = find_normalised_groups(model, case.x())
    assert {frozenset(group.names): group.kind for group in groups} == {
        frozenset(names): kind for names, kind in case.groups.items()
    }
    for group in groups:
        e = group.evidence
        assert max(e.e_half, e.e_double) < (1e-5 if "float32" in case.name else 1e-9)
        assert (
            e.e_jacobian < (1e-4 if "float32" in case.name else 1e-6) if group.kind == "exact" else e.e_jacobian > 1e-3
        )
        assert group.sentence.startswith(group.kind)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_models_give_the_same_groups(case: Case):
    groups = found(made(case.build, torch.float32), case.x())
    assert {frozenset(names): kind for names, kind in groups.items()} == {
        frozenset(names): kind for names, kind in case.groups.items()
    }


# --- what must not be found ---------------------------------------------------------------------------------


def test_dead_units_prove_nothing():
    model = made(lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # every unit is off at every input: scaling the layer changes nothing
    assert found(model, rows()) == {}


def test_tensors_that_are_zero_prove_nothing():
    model = made(lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)))
    with torch.no_grad():
        model[2].weight.zero_()  # neither layer has any effect as it is
        model[2].bias.zero_()
    assert found(model, rows()) == {}


def test_a_layer_behind_a_scale_of_zero_is_found():
    model = made(lambda: mlp(nn.LayerNorm(6)))
    with torch.no_grad():
        model[1].weight.zero_()
    assert found(model, rows()) == {LAYER: "exact"}


def test_a_key_bias_without_effect_is_no_group():
    groups = found(made(Gpt), tokens())
    assert not any("k.bias" in name for names in groups for name in names)


def test_saturated_units_prove_nothing():
    model = made(lambda: mlp(None))
    with torch.no_grad():
        model[0].weight.mul_(1e3)
        model[0].bias.mul_(1e3)
    assert found(model, rows()) == {}


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1e3])
@pytest.mark.parametrize("norm", [nn.LayerNorm, HandRMSNorm, HandLayerNorm, nn.BatchNorm1d])
def test_eps_does_not_hide_a_group_at_any_scale(norm: Callable[[int], nn.Module], scale: float):
    model = made(lambda: mlp(norm(6)))
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
    assert set(found(model, rows())) == {LAYER}


def test_a_scripted_layer_hides_nothing_from_the_numbers():
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.body = torch.jit.script(nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6)))
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).tanh())

    (group,) = find_normalised_groups(made(Scripted), rows())
    assert group.names == ("body.0.weight", "body.0.bias") and group.kind == "exact"
    assert group.evidence.layers == ()  # its ε stays behind: the outputs change a little


def test_many_groups_are_told_apart():
    def deep() -> nn.Module:
        norms = [layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]
        return nn.Sequential(nn.Linear(3, 8), *norms, nn.Linear(8, 2))

    groups = find_normalised_groups(made(deep), rows())
    assert [group.evidence.layers for group in groups] == [(f"{i + 1} (LayerNorm)",) for i in range(1, 81, 2)]


class Padded(nn.Module):
    """Word and position embeddings into a LayerNorm, as in BERT; the padding word's row gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4, padding_idx=0), nn.Embedding(5, 4)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1]))).mean(1))


def test_a_padding_row_hides_nothing():
    model = made(Padded)
    with torch.no_grad():
        model.words.weight[0] = 0
    ids = torch.randint(0, 7, (8, 5), generator=seeded(1))
    ids[:, -1] = 0
    groups = find_normalised_groups(model, ids)
    assert [set(group.names) for group in groups] == [{"words.weight", "places.weight"}]


def test_one_row_is_enough():
    assert found(made(lambda: mlp(nn.BatchNorm1d(6))), rows(1)) == {LAYER: "statistical"}


def test_a_tied_tensor_is_scaled_everywhere():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.norm1, self.norm2, self.head = nn.LayerNorm(3), nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm2(self.second(self.norm1(self.first(x)).tanh())))

    assert found(made(Twice), rows()) == {("first.weight",): "exact"}


def test_only_inferred_parameters_take_part_and_numbers_decide():
    model = made(lambda: mlp(nn.LayerNorm(6)))
    model[0].bias.requires_grad_(False)  # the weight alone is not invariant: the bias does not scale with it
    assert found(model, rows()) == {}
    model = made(lambda: cnn(nn.InstanceNorm2d(4)))
    model[0].bias.requires_grad_(False)  # here the bias cancels
    assert found(model, pictures()) == {("0.weight",): "exact"}


def test_the_layer_that_absorbs_the_scale_is_named():
    (group,) = find_normalised_groups(made(lambda: mlp(nn.BatchNorm1d(6))), rows())
    assert group.evidence.layers == ("1 (BatchNorm1d)",)
    assert group.title == "normalised: 0.weight, 0.bias"
    assert group.sentence.startswith("statistical: 1 (BatchNorm1d) with its running statistics absorbs the scale")


@pytest.mark.parametrize("maker", test_untouched.MAKERS)
def test_models_as_training_leaves_them_are_untouched(maker: Callable[[], nn.Module]):
    model = test_untouched.made(maker)
    stir()
    with untouched(model):
        lw.prior(model, groups="normalised", data=test_untouched.X)


def test_a_model_that_fails_on_the_data_says_so_and_is_untouched():
    model = made(lambda: mlp(nn.LayerNorm(6)))
    with untouched(model), pytest.raises(lw.ModelError, match="own forward pass raised"):
        lw.prior(model, groups="normalised", data=torch.zeros(4, 5))


def test_a_network_that_is_never_twice_the_same_has_no_groups():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(nn.LayerNorm(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) + torch.randn(len(x), 2)

    assert found(made(Noisy), rows()) == {}


# --- priors -------------------------------------------------------------------------------------------------


def test_every_tensor_has_one_group():
    model = made(Gpt)
    prior = lw.prior(model, precision=2.0, groups="normalised", data=(tokens(), torch.zeros(8, dtype=torch.long)))
    table = {row.name: row for row in group_table(prior)}
    assert list(table) == [
        "normalised: token.weight, place.weight, blocks.0.o.weight, … (10 in all)",
        "norm scales",
        "norm shifts",
        "last layer",
        "remainder",
    ]
    assert table["last layer"].tensors == ("head.weight",)
    assert set(table["norm shifts"].tensors) == {
        *(f"blocks.{i}.norm{j}.bias" for i in range(2) for j in (1, 2)), "norm.bias"
    }  # fmt: skip
    assert sum(row.n_parameters for row in table.values()) == sum(p.numel() for p in model.parameters())
    assert sorted(t for row in table.values() for t in row.tensors) == sorted(n for n, _ in model.named_parameters())
    assert all(row.reason and row.precision == 2.0 for row in table.values())


def test_scales_and_shifts_of_norms_written_by_hand_are_told_apart():
    prior = lw.prior(made(lambda: mlp(HandLayerNorm(6))), groups="normalised", data=rows())
    table = {row.name: row.tensors for row in group_table(prior)}
    assert (table["norm scales"], table["norm shifts"]) == (("1.a",), ("1.b",))


def test_one_plus_a_parameter_is_a_scale():
    class OnePlus(HandRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return (1.0 + self.gain) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    prior = lw.prior(made(lambda: mlp(OnePlus(6))), groups="normalised", data=rows())
    assert {row.name: row.tensors for row in group_table(prior)}["norm scales"] == ("1.gain",)


def test_without_normalised_groups_there_is_one_precision_and_it_says_so():
    prior = lw.prior(made(lambda: mlp(None)), precision=3.0, groups="normalised")
    assert prior.group_names == ("all",) and prior.precisions.tolist() == [3.0]
    assert prior.reasons == ("No normalised group was found: all parameters share one precision.",)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.x in (rows, pictures, series, tokens)], ids=lambda case: case.name
)
def test_inputs_are_made_up_when_none_are_given(case: Case):
    model = made(case.build, torch.float32)
    stir()
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        prior = lw.prior(model, groups="normalised")
    tensors = {frozenset(row.tensors) for row in group_table(prior) if row.name.startswith("normalised")}
    assert tensors == {frozenset(names) for names in case.groups}


class Shy(nn.Module):
    """Runs on no made-up input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.free = nn.Linear(2, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(self.norm(F.relu(self.a(x))) + self.free(y))


def test_a_model_that_does_not_run_is_read_and_said_to_be_unconfirmed():
    model = made(Shy)
    with untouched(model), pytest.warns(UserWarning, match="read off its structure alone .1 found"):
        prior = lw.prior(model, groups="normalised")
    assert prior.group_names == (
        "normalised: a.weight, a.bias", "norm scales", "norm shifts", "last layer", "remainder"
    )  # fmt: skip
    assert prior.reasons[0].startswith("structural: norm (LayerNorm) follows, but no input was at hand")


def test_precisions_may_be_given_per_group():
    model = made(lambda: mlp(nn.LayerNorm(6)))
    prior = lw.prior(model, precision=[1.0, 2.0, 3.0, 4.0], groups="normalised", data=rows())
    assert prior.group_names == ("normalised: 0.weight, 0.bias", "norm scales", "norm shifts", "last layer")
    assert_close(prior.P0.diagonal[prior.layout["0.bias"]], torch.full((6,), 1.0, dtype=torch.float64))
    with pytest.raises(lw.ShapeError, match="4 groups but 2 precisions"):
        lw.prior(model, precision=[1.0, 2.0], groups="normalised", data=rows())


def test_an_unknown_word_lists_the_groups():
    with pytest.raises(lw.InputError, match='Did you mean "normalised"'):
        lw.prior(made(lambda: mlp(None)), groups="normalized")


@pytest.mark.parametrize("data", [
    rows, lambda: rows().numpy(), lambda: (rows(), torch.zeros(8)), lambda: [(rows(), torch.zeros(8))],
    lambda: {"input": rows()}, lambda: torch.utils.data.TensorDataset(rows(), torch.zeros(8)),
], ids=["tensor", "array", "pair", "batches", "mapping", "data set"])  # fmt: skip
def test_data_may_come_in_any_form(data: Callable[[], Any]):
    prior = lw.prior(made(lambda: mlp(nn.LayerNorm(6))), groups="normalised", data=data())
    assert "normalised: 0.weight, 0.bias" in prior.group_names


STRUCTURES = list(curvature.STRUCTURES)
TAKEN = ["LayerNorm", "LayerNorm by hand", "GroupNorm", "InstanceNorm, running", "ResNet", "old weight_norm", "GPT"]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in TAKEN], ids=lambda case: case.name)
def test_every_structure_takes_the_prior(case: Case, structure: str):
    model, x = made(case.build), as_double(case.x())
    with torch.no_grad():
        outputs = model.eval()(x)
    y = torch.randint(outputs.shape[-1], outputs.shape[:-1], generator=seeded(1))
    posterior = lw.fit(
        model, (x, y), "classification", structure=structure, prior=lw.prior(model, groups="normalised", data=x)
    )
    assert bool(torch.isfinite(posterior.outputs(x).var).all())
    assert len(posterior.effective_dimension()) == len(posterior.prior.group_names)


def test_a_posterior_over_some_parameters_keeps_its_part_of_the_prior():
    model, x = made(lambda: mlp(nn.LayerNorm(6))), rows()
    prior = lw.prior(model, precision=[1.0, 2.0, 3.0, 4.0], groups="normalised", data=x)
    posterior = lw.fit(model, (x, torch.zeros(8, 2)), "regression", params=["1", "3"], prior=prior)
    assert posterior.prior.group_names == ("norm scales", "norm shifts", "last layer")
    assert posterior.prior.precisions.tolist() == [2.0, 3.0, 4.0]
    assert posterior.prior.reasons == prior.reasons[1:]


def test_an_existing_prior_is_regrouped_at_geometric_means():
    model, x = made(lambda: mlp(nn.LayerNorm(6))), rows()
    prior = lw.prior(model, precision=[1.0, 16.0, 3.0, 4.0, 5.0, 6.0], groups="tensor", mean=0.5)
    posterior = lw.fit(model, (x, torch.zeros(8, 2)), "regression", structure="diag", prior=prior)
    with untouched(model):
        regrouped = normalised_prior(posterior.linearised, as_input(x), posterior.prior)
    assert regrouped.group_names == ("normalised: 0.weight, 0.bias", "norm scales", "norm shifts", "last layer")
    expected = [16.0 ** (6 / 24), 3.0, 4.0, 5.0 ** (12 / 14) * 6.0 ** (2 / 14)]
    assert_close(regrouped.precisions, torch.tensor(expected, dtype=torch.float64))
    assert float(regrouped.mean) == 0.5
    assert posterior.with_prior(regrouped).prior.reasons == regrouped.reasons


def test_a_posterior_keeps_the_groups_of_the_weights_it_was_fitted_at():
    model, x = made(lambda: mlp(nn.LayerNorm(6))), rows()
    posterior = lw.fit(model, (x, torch.zeros(8, 2)), "regression", structure="diag")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))  # trained on, to no good
    assert len(normalised_prior(posterior.linearised, as_input(x), posterior.prior).group_names) == 4
    assert len(normalised_prior(posterior.linearised, None, posterior.prior).group_names) == 4


# --- what a precision of its own is for: invariance ------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """A network, its inputs, and which BatchNorm follows each group."""

    name: str
    build: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    statistics: dict[str, str] = field(default_factory=dict)  # first tensor of a group → its BatchNorm


def deep_mlp(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 5), norm(5), nn.Tanh(), nn.Linear(5, 4), norm(4), nn.Tanh(), nn.Linear(4, 2)
    )  # fmt: skip


def small_cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    )  # fmt: skip


BEFORE_NORMS = {"0.weight": "1", "3.weight": "4"}
SCALED = [
    Scaled("MLP, BatchNorm", lambda: deep_mlp(nn.BatchNorm1d), rows, BEFORE_NORMS),
    Scaled("CNN, BatchNorm", lambda: small_cnn(nn.BatchNorm2d), pictures, BEFORE_NORMS),
    Scaled("MLP, LayerNorm", lambda: deep_mlp(nn.LayerNorm), rows),
    Scaled("CNN, GroupNorm", lambda: small_cnn(lambda c: nn.GroupNorm(2, c)), pictures),
    Scaled("pre-LN transformer", lambda: encoder(norm_first=True), series),
    Scaled("GPT, QK-norm", lambda: Gpt(qk_norm=True), tokens),
    Scaled("weight_norm", lambda: nn.Sequential(weight_norm(nn.Linear(3, 6)), nn.Tanh(), nn.Linear(6, 2)), rows),
]


def without_eps(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-30
    return model


def rescaled(model: nn.Module, case: Scaled, names: tuple[str, ...], k: float) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            parameters[name].mul_(k)
        if names[0] in case.statistics:
            norm = model.get_submodule(case.statistics[names[0]])
            norm.running_mean.mul_(k)
            norm.running_var.mul_(k**2)


def targets(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        f = copy.deepcopy(model).eval()(x)
    return f + 0.3 * torch.randn(f.shape, generator=seeded(9), dtype=f.dtype)


def answers(posterior: lw.Posterior, x: Tensor) -> list[Tensor]:
    outputs = posterior.outputs(x)
    return [outputs.mean, outputs.var, posterior.log_evidence(), posterior.effective_dimension()]


@pytest.mark.parametrize(
    ("structure", "k"), [("full", 0.1), ("full", 10.0), ("block", 0.1), ("kron", 10.0), ("ekfac", 0.1), ("diag", 10.0)]
)
@pytest.mark.parametrize("case", SCALED, ids=lambda case: case.name)
def test_answers_do_not_depend_on_the_scale_of_normalised_groups(case: Scaled, structure: str, k: float):
    model, x = without_eps(made(case.build)), as_double(case.x())
    data, likelihood = (x, targets(model, x)), lw.Gaussian(noise_std=0.5)
    groups = find_normalised_groups(model, x)
    assert len(groups) >= 1
    precision = torch.linspace(0.5, 3.0, len(lw.prior(model, groups="normalised", data=x).group_names))
    prior = lw.prior(model, precision, groups="normalised", data=x)
    other, precisions = copy.deepcopy(model), prior.precisions.clone()
    for group in groups:
        rescaled(other, case, group.names, k)
        precisions[prior.group_names.index(group.title)] /= k**2
    moved = lw.prior(other, precisions, groups="normalised", data=x)
    assert moved.group_names == prior.group_names

    before = lw.fit(model, data, likelihood, structure=structure, prior=prior)
    after = lw.fit(other, data, likelihood, structure=structure, prior=moved)
    for a, b in zip(answers(before, x), answers(after, x), strict=True):
        assert_close(b, a, rtol=1e-8)

    # With one precision for all the variance moves with the scale of weights that have no scale.
    shared = [lw.fit(m, data, likelihood, structure=structure, prior=1.0).outputs(x).var for m in (model, other)]
    assert float(((shared[1] - shared[0]).abs() / shared[0]).max()) > 0.01
