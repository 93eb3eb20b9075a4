"""params="last_layer" where the head's weight is the embedding's too: one tensor, with a part of J from each place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import lapwing as lw
from lapwing.network import parameters
from untouched import untouched

TOKENS = torch.tensor([[0, 3, 2], [5, 5, 1], [4, 0, 6], [1, 2, 3]])
TARGETS = torch.tensor([[3, 2, 1], [5, 1, 0], [0, 6, 6], [2, 3, 4]])


class Tied(nn.Module):
    """A small causal language model; as in GPT-2 the head's weight is the embedding's."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=bias)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens).cumsum(1))))


def jacobian(model: nn.Module, names: tuple[str, ...]) -> Tensor:
    """(n, t, c, p) by torch.func: functional_call replaces a tied tensor in every place."""
    chosen = {name: dict(model.named_parameters())[name].detach() for name in names}
    J = vmap(jacrev(lambda some, x: functional_call(model, some, (x[None],))[0]), in_dims=(None, 0))(chosen, TOKENS)
    return torch.cat([J[name].flatten(3) for name in names], -1)


def ggn(model: nn.Module, J: Tensor) -> Tensor:
    p = model(TOKENS).softmax(-1).detach()
    return torch.einsum("ntcp,ntcd,ntdq->pq", J, torch.diag_embed(p) - p[..., :, None] * p[..., None, :], J)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "block", "diag", "lowrank", "matrixfree"])
def test_a_tied_head_is_inferred_as_the_one_tensor_it_is(structure: str, bias: bool) -> None:
    model = Tied(bias)
    with untouched(model):
        posterior = lw.fit(
            model, (TOKENS, TARGETS), "classification", params="last_layer", structure=structure, prior=2.0
        )
    names = ("embedding.weight", "head.bias") if bias else ("embedding.weight",)
    assert posterior.layout.names == names
    J = jacobian(model, names)
    H = ggn(model, J)
    if structure == "diag":
        H = torch.diag(H.diagonal())
    elif structure in ("kron", "ekfac", "block"):  # one exact block for each tensor: they are of different modules
        H = torch.block_diag(H[:28, :28], H[28:, 28:])
    torch.testing.assert_close(posterior.curvature.to_dense(), H, rtol=1e-8, atol=1e-10)
    covariance = torch.linalg.inv(H + 2 * torch.eye(len(H), dtype=H.dtype))
    J = J.flatten(1, 2)
    torch.testing.assert_close(posterior.outputs(TOKENS).cov, J @ covariance @ J.mT, rtol=1e-4, atol=1e-5)


def test_all_parameters_agree_with_the_last_layer_on_the_tied_ones() -> None:
    model = Tied(bias=True)
    whole = lw.fit(model, (TOKENS, TARGETS), "classification", structure="full")
    last = lw.fit(model, (TOKENS, TARGETS), "classification", structure="full", params="last_layer")
    some = torch.cat([torch.arange(whole.layout.p)[whole.layout[name]] for name in last.layout.names])
    torch.testing.assert_close(last.curvature.to_dense(), whole.curvature.to_dense()[some][:, some])


def test_a_plan_knows_that_a_tied_head_goes_through_the_body() -> None:
    model = Tied(bias=False)
    assert parameters.tied(model, parameters.of_module(model, "head"))
    assert not parameters.tied(model, parameters.of_module(model, "mix"))
    assert lw.plan(model, (TOKENS, TARGETS), "classification", params="last_layer").chosen is not None


def test_an_untied_head_is_its_own() -> None:
    model = Tied(bias=False)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert lw.fit(model, (TOKENS, TARGETS), "classification", params="last_layer").layout.names == ("head.weight",)


def test_a_frozen_tied_head_is_refused() -> None:
    model = Tied(bias=False)
    model.embedding.requires_grad_(False)
    with pytest.raises(lw.InputError, match="no trainable parameter"):
        lw.fit(model, (TOKENS, TARGETS), "classification", params="last_layer")
