"""Leave-one-out effects against fitting again without the datum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from oracle import assert_close

NOISE, PRECISION = 0.4, 2.0


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ridge(X: Tensor, Y: Tensor) -> nn.Module:
    """A linear model at its posterior mode."""
    model = nn.Linear(X.shape[1], Y.shape[1]).double()
    Z = torch.cat([X, torch.ones(len(X), 1).double()], 1)
    W = torch.linalg.solve(Z.T @ Z / NOISE**2 + PRECISION * torch.eye(Z.shape[1]), Z.T @ Y / NOISE**2).T
    with torch.no_grad():
        model.weight.copy_(W[:, :-1])
        model.bias.copy_(W[:, -1])
    return model


def fitted(X: Tensor, Y: Tensor, structure: str = "full") -> lw.Posterior:
    return lw.fit(ridge(X, Y), (X, Y), lw.Gaussian(noise_std=NOISE), structure=structure, prior=PRECISION)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("structure", ["full", "gp", "lowrank"])
def test_a_linear_models_shifts_are_those_of_fitting_without_the_datum(outputs: int, structure: str):
    X, Y, x = draw(9, 3), draw(9, outputs, seed=1), draw(4, 3, seed=2)
    posterior = fitted(X, Y, "full" if structure == "lowrank" else structure)
    found = posterior.influence((X, Y), x)
    before = posterior.outputs(x)
    for n in range(9):
        rest = [i for i in range(9) if i != n]
        after = fitted(X[rest], Y[rest]).outputs(x)
        assert_close(found.mean_shift[..., n], after.mean - before.mean, 1e-8)
        assert_close(found.variance_shift[..., n], after.var - before.var, 1e-8)


def test_the_effect_is_the_derivative_in_the_datums_weight():
    X, Y, x = draw(9, 3), draw(9, 1, seed=1), draw(4, 3, seed=2)
    found = fitted(X, Y).influence((X, Y), x)
    h, n = 1e-5, 4

    def at(weight: float) -> Tensor:  # a datum that counts w times is one scaled by √w
        w = torch.ones(9, 1).double()
        w[n] = weight**0.5
        Z = torch.cat([X, torch.ones(9, 1).double()], 1) * w
        W = torch.linalg.solve(Z.T @ Z / NOISE**2 + PRECISION * torch.eye(4), Z.T @ (Y * w) / NOISE**2)
        return torch.cat([x, torch.ones(4, 1).double()], 1) @ W

    slope = (at(1 + h) - at(1 - h)) / (2 * h)
    assert_close(found.effect[..., n], -slope, 1e-6)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ekfac", "block", "gp"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_every_structure_against_its_own_dense_covariance(structure: str, task: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    X, x = draw(6, 3), draw(2, 3, seed=2)
    Y = draw(6, 3, seed=1) if task == "regression" else torch.arange(6) % 3
    likelihood = lw.Gaussian(noise_std=NOISE) if task == "regression" else lw.Categorical()
    posterior = lw.fit(model, (X, Y), likelihood, structure=structure, prior=PRECISION)
    found = posterior.influence((X, Y), x)
    Sigma = posterior.covariance()
    if structure in ("kron", "diag", "ekfac", "block") and task == "regression":  # few data, of which each has much
        with pytest.raises(lw.NumericalError, match="not be positive definite"):
            _ = found.mean_shift
    J, J_test = (_jacobian(model, each) for each in (X, x))
    f = model(X).detach()
    for n in range(6):
        if task == "regression":
            r, Lambda = (Y[n] - f[n]) / NOISE**2, torch.eye(3).double() / NOISE**2
        else:
            p = f[n].softmax(0)
            r, Lambda = torch.eye(3).double()[Y[n]] - p, p.diag() - p.outer(p)
        assert_close(found.effect[..., n], -J_test @ Sigma @ J[n].T @ r, 1e-8)
        if bool((found.left_over <= 0).any()):
            continue
        without = torch.linalg.inv(torch.linalg.inv(Sigma) - J[n].T @ Lambda @ J[n])
        assert_close(found.mean_shift[..., n], -J_test @ without @ J[n].T @ r, 1e-6)
        change = torch.einsum("tkp,pq,tkq->tk", J_test, without - Sigma, J_test)
        assert_close(found.variance_shift[..., n], change, 1e-6)


def _jacobian(model: nn.Module, x: Tensor) -> Tensor:
    ps = list(model.parameters())
    return torch.stack([
        torch.stack([torch.cat([g.reshape(-1) for g in torch.autograd.grad(f, ps, retain_graph=True)]) for f in row])
        for row in model(x)
    ])  # fmt: skip


def test_of_data_on_themselves_and_their_log_likelihood():
    X, Y = draw(9, 3), draw(9, 2, seed=1)
    posterior = fitted(X, Y)
    own, crossed = posterior.influence((X, Y)), posterior.influence((X, Y), (X, Y))
    at = torch.arange(9)
    assert_close(own.mean_shift.T, crossed.mean_shift[at, :, at])
    assert_close(own.variance_shift.T, crossed.variance_shift[at, :, at])
    assert_close(own.log_lik, crossed.log_lik[at, at])
    left_out = posterior.outputs(X).mean + own.mean_shift.T
    lik = torch.distributions.Normal(left_out, NOISE).log_prob(Y).sum(1)
    before = torch.distributions.Normal(posterior.outputs(X).mean, NOISE).log_prob(Y).sum(1)
    assert_close(own.log_lik, lik - before, 1e-8)


def test_several_terms_of_a_datum_and_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    X, Y = draw(5, 4, 2), torch.arange(20).reshape(5, 4) % 3
    posterior = lw.fit(model, (X, Y), "classification", structure="full")
    whole = posterior.influence((X, Y), X[:2])
    pieces = posterior.influence([(X[:3], Y[:3]), (X[3:], Y[3:])], X[:2])
    assert whole.mean_shift.shape == (2, 12, 5)
    assert_close(whole.mean_shift, pieces.mean_shift)
    J = torch.stack([_jacobian(model, x) for x in X]).flatten(1, 2)
    p = model(X[4]).softmax(-1).detach()
    Lambda = torch.block_diag(*(q.diag() - q.outer(q) for q in p))
    r = (torch.eye(3).double()[Y[4]] - p).flatten()
    without = torch.linalg.inv(torch.linalg.inv(posterior.covariance()) - J[4].T @ Lambda @ J[4])
    assert_close(whole.mean_shift[..., 4], -J[:2] @ without @ J[4].T @ r, 1e-6)


def test_planted_label_noise_is_found():
    torch.manual_seed(0)
    X = draw(200, 2)
    Y = (X.sum(1) > 0).long()
    wrong = torch.arange(200) % 10 == 0
    Y[wrong] = 1 - Y[wrong]
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimiser.step()
    found = lw.fit(model, (X, Y), "classification", structure="kron").influence((X, Y))
    assert metrics.auroc(-found.log_lik[~wrong], -found.log_lik[wrong]) > 0.9


def test_bad_input():
    X, Y = draw(6, 3), draw(6, 1, seed=1)
    posterior = fitted(X, Y)
    with pytest.raises(lw.ShapeError):
        posterior.influence((X, Y[:, :0]))
    with pytest.raises(lw.NumericalError, match="not among the data"):
        _ = posterior.influence((1e6 * X, Y)).mean_shift


def test_a_shuffling_loader_is_read_in_the_order_of_its_data():
    X, Y = draw(9, 3), draw(9, 1, seed=1)
    posterior, rows = fitted(X, Y), torch.utils.data.TensorDataset(X, Y)
    expected = posterior.influence((X, Y)).mean_shift
    shuffled = torch.utils.data.DataLoader(rows, 2, shuffle=True)
    assert_close(posterior.influence(shuffled).mean_shift, expected, 1e-12)
    with pytest.raises(lw.InputError, match="cannot be matched to the data"):
        posterior.influence(torch.utils.data.DataLoader(rows, 2, shuffle=True, drop_last=True))
