"""A script written for laplace-torch, and the numbers it would expect: against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
import oracle
from lapwing.compat.laplace_torch import Laplace
from oracle import assert_close


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def loader(X: Tensor, Y: Tensor) -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=4)


X, X_TEST = draw(12, 2), draw(5, 2, seed=2)
TARGETS, LABELS = draw(12, 1, seed=1), torch.arange(12) % 3


def dense(model: nn.Module, kind: str, y: Tensor, delta: float, sigma: float = 1.0) -> tuple[Tensor, Tensor]:
    """The GGN and the log evidence."""
    f, J = oracle.jacobian(model, X)
    H = oracle.ggn(
        J, oracle.hessians(kind, f[:, None], y if kind == "categorical" else y[:, None], noise_std=sigma)[:, 0]
    )
    lik = oracle.log_lik(kind, f[:, None], y[:, None], noise_std=sigma)
    return H, oracle.log_evidence(lik, H, delta, oracle.theta(model))


def test_regression_with_their_defaults_but_the_structure():
    model = network(1)
    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full", sigma_noise=0.5)
    la.fit(loader(X, TARGETS))
    H, evidence = dense(model, "gaussian", TARGETS, 1.0, 0.5)
    assert_close(la.log_marginal_likelihood(), evidence, 1e-9)
    mean, cov = la(X_TEST)
    f, J = oracle.jacobian(model, X_TEST)
    assert_close(mean, f)
    assert_close(cov, oracle.functional_cov(J, oracle.posterior(H, 1.0)), 1e-8)
    joint_mean, joint = la(X_TEST, joint=True)
    assert_close(joint_mean, f.flatten())
    assert_close(joint, oracle.joint_cov(J, oracle.posterior(H, 1.0)), 1e-8)
    assert la(X_TEST, diagonal_output=True)[1].shape == (5, 1)


def test_the_evidence_is_climbed_by_gradients_as_their_scripts_do():
    la = Laplace(network(1), "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(loader(X, TARGETS))
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    values = []
    for _ in range(20):
        optimiser.zero_grad()
        value = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        value.backward()
        optimiser.step()
        values.append(float(value.detach()))
    assert values[-1] < values[0] and log_prior.grad is not None and log_sigma.grad is not None


def test_classification_with_all_defaults():
    model = network(3)
    la = Laplace(model, "classification")
    la.fit(loader(X, LABELS))
    assert la.n_params == 5 * 3 + 3 and la.n_data == 12
    own = lw.fit(model, (X, LABELS), "classification", params="last_layer", structure=lw.Kron(bias="separate"))
    assert_close(la(X_TEST), own.predict(X_TEST, link="probit").probs)
    for link in ("mc", "bridge", "bridge_norm"):
        assert_close(la(X_TEST, link_approx=link).sum(-1), torch.ones(5))
    assert la(X_TEST, pred_type="nn").shape == la(X_TEST).shape == (5, 3)
    assert_close(la.predictive_samples(X_TEST, n_samples=7).sum(-1), torch.ones(7, 5))


@pytest.mark.parametrize(("structure", "n"), [("scalar", 1), ("layerwise", 4), ("diag", 33)])
def test_the_prior_by_the_evidence(structure: str, n: int):
    la = Laplace(network(3), "classification", subset_of_weights="all", hessian_structure="diag")
    la.fit(loader(X, LABELS))
    before = la.log_marginal_likelihood()
    la.optimize_prior_precision(prior_structure=structure)
    assert la.prior_precision.shape == (n,) and la.log_marginal_likelihood() > before


def test_the_prior_on_a_grid():
    la = Laplace(network(3), "classification", subset_of_weights="all")
    la.fit(loader(X, LABELS))
    held_out = loader(draw(6, 2, seed=5), torch.arange(6) % 3)
    la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=9)
    scores = []
    for k in range(-4, 5):
        p = la.posterior.with_prior(10.0**k).predict(draw(6, 2, seed=5), link="probit", n_samples=100)
        scores.append(float(-p.log_prob(torch.arange(6) % 3).mean()))
    assert_close(la.prior_precision, [10.0 ** (min(range(9), key=scores.__getitem__) - 4)])


def test_more_data_and_values_that_are_set():
    la = Laplace(network(1), "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(loader(X[:6], TARGETS[:6]))
    la.fit(loader(X[6:], TARGETS[6:]), override=False)
    whole = Laplace(network(1), "regression", subset_of_weights="all", hessian_structure="full")
    whole.fit(loader(X, TARGETS))
    assert_close(la(X_TEST)[1], whole(X_TEST)[1])
    la.prior_precision, la.sigma_noise = 4.0, 0.3
    H, evidence = dense(network(1), "gaussian", TARGETS, 4.0, 0.3)
    assert_close(la.log_marginal_likelihood(), evidence, 1e-9)
    assert_close(la.posterior_variance, oracle.posterior(H, 4.0).diagonal(), 1e-8)


def test_temperature_divides_the_likelihood():
    cold = Laplace(network(1), "regression", "all", "full", temperature=0.5)
    cold.fit(loader(X, TARGETS))
    H, _ = dense(network(1), "gaussian", TARGETS, 1.0)
    assert_close(cold.posterior_variance, oracle.posterior(2 * H, 1.0).diagonal(), 1e-8)


def test_what_is_not_there_is_named():
    with pytest.raises(lw.StructureError, match="subset_of_weights='subnetwork'"):
        Laplace(network(1), "regression", "subnetwork")
    with pytest.raises(lw.StructureError, match="feature_reduction"):
        Laplace(network(1), "regression", feature_reduction="pick_first")
    with pytest.raises(lw.StructureError, match="reward_modeling"):
        Laplace(network(1), "reward_modeling")
    with pytest.raises(lw.InputError, match="full, kron, diag"):
        Laplace(network(1), "regression", hessian_structure="blocks")
    la = Laplace(network(1), "regression")
    with pytest.raises(lw.InputError, match="call fit"):
        la(X)
    la.fit(loader(X, TARGETS))
    with pytest.raises(lw.InputError, match="val_loader"):
        la.optimize_prior_precision(method="gridsearch")


def test_attributes_that_are_not_there_are_named_and_absent():
    la = Laplace(network(1), "regression")
    la.fit(loader(X, TARGETS))
    for name, instead in (("state_dict", "lw.save"), ("functional_variance", r"outputs\(x\).cov"), ("H", "curvature")):
        assert not hasattr(la, name)
        with pytest.raises(lw.StructureError, match=instead):
            getattr(la, name)
    with pytest.raises(AttributeError, match="no attribute 'posterior_mean'"):
        la.posterior_mean  # noqa: B018


def test_the_last_layer_can_be_named_and_gradients_switched_on():
    model = network(3)
    la = Laplace(model, "classification", last_layer_name="2", enable_backprop=True)
    plain = Laplace(model, "classification")
    for each in (la, plain):
        each.fit(loader(X, LABELS))
    assert (la.n_params, la.n_outputs) == (18, 3)
    assert_close(la(X_TEST), plain(X_TEST))
    assert_close(la.posterior_covariance.diagonal(), la.posterior_variance)
    x = X_TEST.clone().requires_grad_()
    (g,) = torch.autograd.grad(la(x).square().sum(), x)
    assert bool(g.ne(0).any())
