"""Products with J and the Gauss–Newton matrix, for every architecture, against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oracle
from cases import by_name, over_architectures
from lapwing.api.words import layout_choice
from lapwing.data import as_batches
from lapwing.data.targets import encoded_batches
from lapwing.likelihoods import Sites
from lapwing.linear_model import design
from lapwing.network.products import DataJacobian, can_push
from lapwing.network.products.jvp import together
from lapwing.network.products.vjp import batched, one_by_one
from lapwing.network.rule_check import linearise
from lapwing.operators import GroupedDiagonal
from makers import randn
from oracle import assert_close
from truth import Truth


def data_jacobian(truth: Truth, by_datum: bool = False) -> DataJacobian:
    """All data in one batch, or one datum at a time."""
    n, likelihood = truth.case.n, truth.likelihood()
    single = [(oracle.slice_x(truth.x, i), truth.y[i : i + 1]) for i in range(n)]
    batches = as_batches(single if by_datum else [(truth.x, truth.y)])
    linearised = linearise(truth.model, layout_choice("all"), batches.first()[0])
    sites = Sites(linearised.datum_shape, likelihood.class_axis)
    return DataJacobian.of(linearised, lambda: encoded_batches(batches, likelihood, sites, progress=False))


@over_architectures
def test_products_of_all_architectures(case) -> None:
    """J v, Jᵀ u and J D Jᵀ u for three vectors at once; attention, recurrent and weight-normed models included."""
    truth = Truth.of(case)
    _, J = truth.jacobian
    n, k, p = J.shape
    g = torch.Generator().manual_seed(0)
    v, u = randn(3, p, g=g), randn(3, n, k, g=g)
    D = GroupedDiagonal(torch.tensor([0.5, 2.0], dtype=torch.float64), torch.arange(p) % 2)
    data = data_jacobian(truth)
    assert_close(data.mv(v), torch.einsum("nkp,mp->mnk", J, v))
    assert_close(data.vjp_sum(u), torch.einsum("nkp,mnk->mp", J, u))
    flat = J.reshape(-1, p)
    kernel = (flat * D.diagonal) @ flat.T
    assert_close(data.kernel_mv(u, D).flatten(1), u.flatten(1) @ kernel)


@over_architectures
def test_one_forward_pass_gives_both_products(case) -> None:
    """J v and Jᵀ u, with tangents that run along with the graph where the model allows it, over joined batches."""
    truth = Truth.of(case)
    _, J = truth.jacobian
    n, k, p = J.shape
    g = torch.Generator().manual_seed(0)
    v, u = randn(p, g=g), randn(n, k, g=g)
    source = data_jacobian(truth, by_datum=True)
    data = design(source.linearised, source.source, n=n, most_floats=0)
    found, back, start = [], torch.zeros_like(v), 0
    for piece, q in data.with_jvp(v):
        found.append(q)
        piece.add_vjp_(back, u[start : start + len(q)])
        start += len(q)
    assert_close(torch.cat(found), torch.einsum("nkp,p->nk", J, v))
    assert_close(back, torch.einsum("nkp,nk->p", J, u))


def test_most_architectures_allow_it() -> None:
    for name in ("mlp-tanh", "conv2d-stride"):
        jacobian = data_jacobian(Truth.of(by_name(name)))
        assert can_push(jacobian.linearised, next(iter(jacobian.source()))[0])


@pytest.mark.parametrize("name", ["mlp-tanh", "conv2d-stride", "weight-norm"])
def test_chunks_of_data_do_not_matter(name: str) -> None:
    truth = Truth.of(by_name(name))
    p = truth.jacobian[1].shape[-1]
    v = randn(2, p, g=torch.Generator().manual_seed(1))
    whole = data_jacobian(truth).sandwich(v, lambda piece, q: q)
    assert_close(data_jacobian(truth, by_datum=True).sandwich(v, lambda piece, q: q), whole)


def test_single_precision_passes_are_summed_in_double() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(40, 4), torch.randn(40, 3)
    exact = oracle.jacobian(model.double(), x.double())[1]
    model.float()
    linearised = linearise(model, layout_choice("all"), as_batches((x, y)).first()[0])
    data = DataJacobian.of(linearised, lambda: as_batches([(x[i : i + 1], y[i : i + 1]) for i in range(40)]))
    v = randn(2, linearised.layout.p, g=torch.Generator().manual_seed(2))
    found = data.sandwich(v, lambda piece, q: q)
    assert found.dtype == torch.float64
    assert_close(found, torch.einsum("nkp,nkq,mq->mp", exact, exact, v), rtol=1e-5)


def test_many_vectors_go_back_through_a_network_that_runs_forward_again() -> None:
    truth = Truth.of(by_name("checkpointed"))
    p = len(truth.H)
    J = oracle.jacobian(truth.model, truth.x)[1].flatten(0, 1)
    assert_close(data_jacobian(truth).sandwich(torch.eye(p, dtype=torch.float64), lambda piece, q: q), J.T @ J)


def test_vectors_go_together_but_not_back_through_convolutions() -> None:
    dense, conv = data_jacobian(Truth.of(by_name("mlp-tanh"))), data_jacobian(Truth.of(by_name("conv2d-stride")))
    assert (dense.jvp, dense.vjp) == (together, batched)
    assert (conv.jvp, conv.vjp) == (together, one_by_one)
