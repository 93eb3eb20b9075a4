"""Kernels of convolutional networks: the forms in which rows are kept and written out, and what rounding costs."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lapwing as lw
import oracle
from lapwing.data import as_input
from lapwing.network.jacobian import FactorBlock, Images, Jacobian, SparseBlock
from lapwing.operators import GroupedDiagonal, LowRankPrecision
from makers import randn
from oracle import assert_close


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cnn(**second: int) -> nn.Sequential:
    """Most gradients behind its pooling are zero."""
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 3, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, **second), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)).double()


def problem(**second: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor, torch.Tensor]:
    model = cnn(**second)
    X, Xt = randn(6, 1, 12, 12, g=seeded()), randn(4, 1, 12, 12, g=seeded(1))
    model(X)
    return model, X, torch.tensor([0, 1, 2, 1, 0, 2]), Xt


def rows(model: nn.Module, X: torch.Tensor) -> Jacobian:
    data = (X, torch.zeros(len(X), dtype=torch.long))
    linearised = lw.fit(model, data, "classification", structure="diag", progress=False).linearised
    with linearised.trace(as_input(X)) as trace:
        return trace.jacobian()


@pytest.mark.parametrize("coupling", ["full", "independent"])
@pytest.mark.parametrize("groups", ["one", "layer", "tensor", "element"])
def test_kernels_are_those_of_the_oracle(coupling: str, groups: str) -> None:
    model, X, Y, Xt = problem(padding=1)
    (f, J), (_, Jt) = oracle.jacobian(model, X), oracle.jacobian(model, Xt)
    Lambda = oracle.hessians("categorical", f[:, None], Y[:, None])[:, 0]
    p = J.shape[-1]
    if coupling == "independent":
        J, Jt = (torch.einsum("ncp,cd->ncdp", J, torch.eye(3).double()).flatten(2) for J in (J, Jt))
    precision = {"one": 0.7, "layer": [0.5, 2.0, 1.0], "tensor": [0.5, 1.0, 2.0, 0.7, 1.1, 0.9]}.get(groups)
    every = 0.5 + torch.rand(p, generator=seeded(2), dtype=torch.float64)
    prior = lw.prior(model, precision=every if precision is None else precision, groups=groups)
    d = prior.P0.diagonal.repeat(J.shape[-1] // p)
    gp = lw.fit(model, (X, Y), "classification", structure=lw.GP(coupling=coupling), prior=prior)
    assert_close(gp.outputs(Xt).cov, oracle.functional_cov(Jt, oracle.posterior(oracle.ggn(J, Lambda), d)))


@pytest.mark.parametrize(
    "second",
    [{}, {"padding": 1}, {"stride": 2}, {"dilation": 2}, {"bias": False}, {"padding": 2, "stride": 3}],
    ids=str,
)
def test_images_have_the_patches_of_the_layer(second: dict[str, int]) -> None:
    model, X, *_ = problem(**second)
    block = rows(model, X).blocks[1]
    assert isinstance(block, FactorBlock)
    kept = block.inputs.kept()
    assert isinstance(kept, Images)
    assert torch.equal(kept.tensor(), block.inputs.tensor())
    assert torch.equal(kept.at(slice(1, 4)).tensor(), block.inputs.tensor()[1:4])
    assert kept.concatenated([kept.at(slice(0, 2))], block.g.shape[2]).tensor().shape[0] == 8
    channels, size = model[3].in_channels, kept.tensor().shape[-1] - kept.ones
    turned = kept.in_fastest_order().tensor()[..., :size].unflatten(-1, (-1, channels)).transpose(-1, -2).flatten(-2)
    assert torch.equal(turned, kept.tensor()[..., :size])


def test_sparse_rows_are_the_same_rows() -> None:
    model, X, *_ = problem(padding=1)
    J = rows(model, X)
    block = J.blocks[1]
    assert isinstance(block, FactorBlock)
    thin = SparseBlock.of(block)
    assert isinstance(thin, SparseBlock)
    assert thin.values.numel() < 0.5 * block.g.numel()
    assert torch.equal(thin.plain().g, block.g)
    for mine, theirs in zip(thin.parts(), block.parts(), strict=True):
        assert torch.equal(mine, theirs)
    joined = SparseBlock.of(block.data_at(slice(0, 1))).concatenated([SparseBlock.of(block.data_at(slice(1, 6)))])
    assert isinstance(joined, SparseBlock)
    assert torch.equal(joined.plain().g, block.g)
    assert torch.equal(thin.outputs_at(torch.tensor([2])).plain().g, block.g[:, 2:])
    v = randn(2, J.p, g=seeded())
    assert_close(thin.mv(v), block.mv(v))
    assert_close(J.kept().mv(v), J.mv(v))
    assert_close(J.kept().sum_squares(), J.sum_squares())


def test_a_layer_whose_gradients_are_all_there_is_not_sparse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)).double()
    block = rows(model, randn(3, 1, 5, 5, g=seeded())).blocks[0]
    assert isinstance(block, FactorBlock)
    assert SparseBlock.of(block) is block


def test_several_pairs_of_rows_have_the_kernels_of_each() -> None:
    model, X, _, Xt = problem(padding=1)
    J, K = rows(model, X), rows(model, Xt).kept()
    D = GroupedDiagonal.identity(J.p, J.device)
    mine, theirs = ([rows.outputs_at(torch.tensor([c])) for c in range(3)] for rows in (J, K))
    for c, kernel in enumerate(Jacobian.cross_each(mine, theirs, D)):
        assert_close(kernel, J.dense()[:, c] @ K.dense()[:, c].T)
    assert_close(J.cross(J, D), J.dense().flatten(0, 1) @ J.dense().flatten(0, 1).T)


def test_float32_kernels_are_as_exact_as_their_rounding_says() -> None:
    model, X, _, Xt = problem(padding=1)
    J, K = rows(model.float(), X.float()), rows(model.float(), Xt.float())
    D = GroupedDiagonal.identity(J.p, J.device)
    quick, exact = J.quick().cross(K.quick(), D), J.cross(K, D)
    lengths = [r.own(D).diagonal(dim1=-2, dim2=-1).flatten().sqrt() for r in (J, K)]
    assert J.rounding < 1e-15 < J.quick().rounding
    assert float(((quick - exact).abs() / (lengths[0][:, None] * lengths[1])).max()) < J.quick().rounding
    mine, theirs = ([rows.outputs_at(torch.tensor([c])).quick() for c in range(3)] for rows in (J, K))
    kernels, owns = Jacobian.cross_and_own_each(mine, theirs, D)
    for c in range(3):
        assert torch.equal(kernels[c], mine[c].cross(theirs[c], D))
        assert_close(owns[c], K.outputs_at(torch.tensor([c])).own(D), rtol=2 * J.quick().rounding)


def test_rows_that_share_some_blocks_are_not_taken_for_the_same() -> None:
    model, X, *_ = problem(padding=1)
    J = rows(model, X).kept()
    other = J.kept()
    assert other.blocks is not J.blocks
    assert any(mine is theirs for mine, theirs in zip(J.blocks, other.blocks, strict=True))
    D = GroupedDiagonal.identity(J.p, J.device)
    assert_close(J.cross(other, D), J.cross(J, D))


@pytest.mark.parametrize("delta", [1.0, 1e-2])
def test_float32_variances_are_those_of_float64_products(delta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """To three digits at least, as promised; and no variance is negative, at the data themselves neither."""
    model, X, Y, Xt = problem(padding=1)
    single = copy.deepcopy(model).float()
    x = torch.cat([Xt, X]).float()
    structure = lw.GP(coupling="independent")

    def cov() -> torch.Tensor:
        return lw.fit(single, (X.float(), Y), "classification", structure=structure, prior=delta).outputs(x).cov

    quick = cov()
    assert float(quick.diagonal(dim1=-2, dim2=-1).min()) > 0
    monkeypatch.setattr(Jacobian, "quick", lambda self: self)
    exact = cov()
    assert_close(quick, exact, rtol=1e-5)
    double = lw.fit(model, (X, Y), "classification", structure=structure, prior=delta).outputs(x.double()).cov
    assert_close(quick.double(), double, rtol=1e-4)


def test_kernels_that_would_show_the_rounding_are_formed_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vague prior: what the data leave of the variance is less than float32 products can tell."""
    model, X, Y, _ = problem(padding=1)
    single = copy.deepcopy(model).float()
    gp = lw.fit(single, (X.float(), Y), "classification", structure=lw.GP(coupling="independent"), prior=1e-5)
    quick = gp.outputs(X.float()).cov
    assert float(quick.diagonal(dim1=-2, dim2=-1).min()) > 0
    P = gp.precision.outputs[0]  # type: ignore[attr-defined]
    assert isinstance(P, LowRankPrecision)
    assert P.H.root.has_kernels(P.P0)
    monkeypatch.setattr(Jacobian, "quick", lambda self: self)
    gp = lw.fit(single, (X.float(), Y), "classification", structure=lw.GP(coupling="independent"), prior=1e-5)
    assert_close(quick, gp.outputs(X.float()).cov, rtol=1e-6)


def test_unfold_gives_what_the_layer_sees() -> None:
    """The order of a patch's columns is that of the weight: channel, row, column."""
    x = randn(2, 3, 4, 5, g=seeded())
    images = Images(x.permute(0, 2, 3, 1).contiguous(), (2, 3), (1, 2), (1, 1), ones=False)
    assert torch.equal(images.tensor()[:, :, 0], F.unfold(x, (2, 3), stride=(1, 2)).mT)


def test_inputs_taken_a_few_at_a_time_have_the_same_covariances(monkeypatch: pytest.MonkeyPatch) -> None:
    model, X, Y, Xt = problem(padding=1)
    gp = lw.fit(model, (X, Y), "classification", structure=lw.GP(coupling="independent"), prior=0.7)
    together = gp.outputs(Xt).cov
    monkeypatch.setattr(import_module("lapwing.predictive.pushforward"), "_TRACED_FLOATS", 1)
    assert_close(gp.outputs(Xt).cov, together)
    assert_close(gp.outputs(Xt).var, together.diagonal(dim1=-2, dim2=-1))
