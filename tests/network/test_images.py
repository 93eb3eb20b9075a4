"""Convolutions without writing out their patches, and images with channels last in memory: the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from cases import Case, Net, floats
from lapwing.data import as_input
from lapwing.linalg import GramSum
from lapwing.network.jacobian import FactorBlock, Given, Inputs
from lapwing.network.jacobian.sparse import SparseBlock
from lapwing.network.layers import rule_for
from lapwing.network.layers.base import FactorRule
from lapwing.operators import Arrangement
from oracle import assert_close
from truth import Truth

RTOL = 1e-10

# channels, outputs, kernel, height and width, options
CONVOLUTIONS: list[tuple[int, int, Any, tuple[int, int], dict[str, Any]]] = [
    (3, 2, 3, (6, 5), {"padding": 1}),
    (3, 2, 3, (6, 5), {"padding": 1, "bias": False}),
    (1, 4, 5, (7, 9), {}),
    (2, 2, 1, (4, 4), {}),
    (2, 3, (2, 4), (6, 6), {"padding": "same"}),
    (2, 2, (3, 2), (9, 7), {"dilation": (2, 3), "padding": (1, 2)}),
    (2, 2, 3, (7, 8), {"stride": (1, 2), "padding": 1}),
    (2, 2, 3, (7, 8), {"stride": 2, "padding": 1}),
    (2, 2, 5, (5, 6), {"padding": (0, 2)}),  # one output row
    (2, 2, 4, (5, 5), {}),  # fewer output rows than kernel rows
    (2, 3, (3, 1), (4, 4), {"padding": (3, 0)}),  # more zeros than the kernel reaches back over
    (4, 4, 3, (5, 5), {"groups": 2, "padding": 1}),
    (2, 2, 3, (5, 5), {"padding": 1, "padding_mode": "circular"}),
]


def captured(module: nn.Module, calls: tuple[Tensor, ...], n: int, *, bias: bool) -> Inputs:
    rule = rule_for(module)
    assert isinstance(rule, FactorRule)
    p = module.weight.numel()
    arrangement = rule.arrangement(module, slice(0, p), slice(p, p + len(module.bias)) if bias else None)
    return rule.captured(module, calls, n, arrangement)


def gram(inputs: Inputs) -> Tensor:
    _, _, q, i = inputs.tensor().shape
    total = GramSum(q, i, torch.device("cpu"))
    inputs.add_gram_(total)
    return total.result()


@pytest.mark.parametrize("images_per_datum", [1, 2])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_products_of_patches_without_the_patches(conv: Any, memory: torch.memory_format, images_per_datum: int) -> None:
    c, o, kernel, size, options = conv
    torch.manual_seed(0)
    module, n = nn.Conv2d(c, o, kernel, dtype=torch.float64, **options), 3
    bias = module.bias is not None
    calls = tuple(
        torch.randn(n * m, c, *size, dtype=torch.float64).to(memory_format=memory) for m in (images_per_datum, 1)
    )
    inputs = captured(module, calls, n, bias=bias)
    a = inputs.tensor()
    assert_close(gram(inputs), torch.einsum("nrqi,nrqj->qij", a, a), RTOL)
    U = torch.randn(a.shape[2], a.shape[3], a.shape[3], dtype=torch.float64)
    assert_close(inputs.rotated(U), torch.einsum("nrqi,qij->nrqj", a, U), RTOL)
    for data in (slice(0, 1), slice(1, 9)):
        assert_close(inputs.at(data).tensor(), a[data], RTOL)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
def test_many_images_are_taken_some_at_a_time(memory: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    from lapwing.network.layers import patches

    monkeypatch.setattr(patches, "_CACHED_FLOATS", 200)
    for stride in (1, 2):
        module = nn.Conv2d(2, 3, 3, stride=stride, padding=1).double()
        x = torch.randn(7, 2, 6, 6, dtype=torch.float64).to(memory_format=memory)
        inputs = captured(module, (x,), 7, bias=True)
        a = inputs.tensor()
        assert_close(gram(inputs), torch.einsum("nrqi,nrqj->qij", a, a), RTOL)


def by_view(m: Any, x: Tensor) -> Tensor:
    return m.head(m.conv(x).sin().view(len(x), -1))


def by_flatten(m: Any, x: Tensor) -> Tensor:
    return m.head(m.conv(x).sin().flatten(1))


def case(run: Any) -> Case:
    layers = {"conv": nn.Conv2d(2, 3, 2), "head": nn.Linear(12, 2)}
    return Case("images", "gaussian", (2,), lambda: Net(run, **layers), floats(2, 3, 3))


def test_images_have_channels_last_where_the_model_can_be_run_so() -> None:
    truths = [Truth.of(case(run)) for run in (by_flatten, by_view)]
    posteriors = [truth.fit(structure="kron") for truth in truths]
    layouts = [posterior.linearised.layout_of_images for posterior in posteriors]
    assert layouts == [torch.channels_last, torch.preserve_format]
    for truth, posterior in zip(truths, posteriors, strict=True):
        assert not posterior.linearised.rest.names
        assert_close(posterior.curvature.to_dense(), truth.kronecker(), RTOL)
        with posterior.linearised.trace(as_input(truth.x)) as trace:
            assert_close(trace.jacobian().dense(), truth.jacobian[1], RTOL)


def test_convolutions_in_front_of_the_last_layer_have_channels_last_as_well() -> None:
    truths = [Truth.of(case(run)) for run in (by_flatten, by_view)]
    posteriors = [truth.fit(structure="full", params="last_layer") for truth in truths]
    layouts = [posterior.linearised.layout_of_images for posterior in posteriors]
    assert layouts == [torch.channels_last, torch.preserve_format]
    for truth, posterior in zip(truths, posteriors, strict=True):
        p = posterior.curvature.p  # the head's parameters come last
        assert_close(posterior.curvature.to_dense(), truth.H[-p:, -p:], RTOL)


def test_the_mean_is_the_models_own_output_bit_by_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 2))
    x = torch.randn(5, 3, 6, 6)
    posterior = lw.fit(model, (x, torch.tensor([0, 1, 1, 0, 1])), "classification", structure="kron")
    assert posterior.linearised.layout_of_images == torch.channels_last
    assert torch.equal(posterior.outputs(x).mean, model(x))


def test_data_that_cannot_go_through_with_channels_last_go_as_they_came() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.conv(x).sin()  # (n, 3, 1, 1) for the first data: `view` minds the layout of larger maps only
        return m.head(h.view(len(h), -1)[:, :: h.shape[-1] ** 2])

    torch.manual_seed(0)
    model = Net(run, conv=nn.Conv2d(2, 3, 2), head=nn.Linear(3, 2)).double()
    small, large = (torch.randn(4, 2, s, s, dtype=torch.float64) for s in (2, 3))
    Y = torch.tensor([0, 1, 1, 0])
    posterior = lw.fit(model, [(small, Y), (large, Y)], "classification", structure="kron")
    assert posterior.linearised.layout_of_images == torch.channels_last
    plain = replace(posterior, linearised=replace(posterior.linearised, layout_of_images=torch.preserve_format))
    assert_close(posterior.outputs(large).cov, plain.outputs(large).cov, RTOL)
    with pytest.raises(lw.ModelError, match="forward pass raised"):
        posterior.outputs(torch.randn(2, 5, 3, 3)).cov  # noqa: B018


def test_convolutions_that_torch_cannot_differentiate_with_channels_last_keep_their_layout() -> None:
    """A strided 1 × 1 convolution of few channels: its backward pass would corrupt the heap."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 1, 2), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))
    posterior = lw.fit(model, (torch.randn(40, 2, 8, 8), torch.randn(40, 2)), lw.Gaussian(0.5), structure="diag")
    assert posterior.linearised.layout_of_images == torch.preserve_format


def test_a_bias_of_sparse_gradients_is_their_sum() -> None:
    torch.manual_seed(0)
    g = torch.randn(4, 2, 9, 1, 5, dtype=torch.float64) * (torch.rand(4, 1, 9, 1, 5) < 0.2)
    weight, bias = slice(0, 5 * 12), slice(5 * 12, 5 * 13)
    arrangement = Arrangement(1, 5, weight, bias, (1, 5, 12), (0, 1, 2))
    plain = FactorBlock(arrangement, g, Given(torch.randn(4, 9, 1, 13, dtype=torch.float64)))
    thin = SparseBlock.of(plain)
    assert isinstance(thin, SparseBlock)
    found = thin.within(bias)
    assert found is not None
    assert_close(found.parts()[0], g.sum(2)[:, :, 0])
