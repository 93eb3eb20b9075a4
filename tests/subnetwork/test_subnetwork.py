"""Subnetworks against the oracle: a Jacobian with fewer columns, and everything that follows from it."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from cases import CASES, by_name
from lapwing.data import as_input
from lapwing.network.jacobian import FactorBlock
from lapwing.network.products import jvp
from lapwing.planning.allocations import AllocationCounter
from lapwing.subnetwork.swag import RunningVariance
from lapwing_studies.bench import workloads
from oracle import assert_close
from truth import Truth
from untouched import stir, untouched

QUICK = [
    *("mlp-relu", "one-output-flat", "sequence-output", "image-output", "conv2d-groups", "conv1d-same-circular"),
    *("conv-transpose2d-groups", "batch-norm2d", "layer-norm", "embedding-padding", "embedding-bag-weighted"),
    *("attention-causal", "encoder-pre-norm", "lstm", "tied-weights", "reused-module", "frozen-weights", "bilinear"),
]
ALL = [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow]) for case in CASES]


def some(p: int, k: int) -> Tensor:
    """k of p positions, ascending, the same every time."""
    return torch.randperm(p, generator=torch.Generator().manual_seed(p))[:k].sort().values


def mlp(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(len(widths))
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), activation()]
    return nn.Sequential(*layers[:-1]).double()


def regression(n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def fit(model: nn.Module, params: Any, **options: Any) -> lw.Posterior:
    options.setdefault("prior", 1.3)
    return lw.fit(model, regression(), lw.Gaussian(noise_std=0.3), params=params, **options)


# --- every architecture, with fewer columns --------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL)
def test_equals_the_oracle_with_selected_columns(case: Any) -> None:
    truth = Truth.of(case)
    f, J = truth.jacobian
    S = some(J.shape[-1], min(25, J.shape[-1] // 2))
    posterior = truth.fit(params=lw.Subnetwork(indices=S))
    H, d = truth.H[S][:, S], torch.full((len(S),), truth.precision, dtype=torch.float64)
    Sigma, theta = oracle.posterior(H, d), oracle.theta(truth.model)[S]

    assert_close(posterior.mean, theta, rtol=1e-15)
    assert_close(posterior.curvature.to_dense(), H)
    assert_close(posterior.covariance(), Sigma)
    assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(J[..., S], Sigma))
    assert_close(posterior.log_evidence(), oracle.log_evidence(truth.log_lik, H, d, theta))
    sites = oracle.residuals(case.kind, f[:, case.index], truth.targets, **truth.options)
    r = torch.zeros_like(f)
    r[:, case.index.flatten()] = sites.flatten(1)
    assert_close(posterior.data_gradient(), torch.einsum("nkp,nk->p", J[..., S], r))


@pytest.mark.parametrize("name", ["mlp-relu", "conv2d-groups", "embedding-padding", "attention-causal", "tied-weights"])
@pytest.mark.parametrize("structure", ["block", "diag"])
def test_other_structures_are_projections(name: str, structure: str) -> None:
    truth = Truth.of(by_name(name))
    S = some(truth.H.shape[0], truth.H.shape[0] // 2)
    posterior = truth.fit(params=lw.Subnetwork(indices=S), structure=structure)
    keep = torch.eye(len(S), dtype=torch.float64)
    if structure == "block":
        sizes = [s.stop - s.start for s in posterior.layout.module_slices.values()]
        keep = torch.block_diag(*(torch.ones(n, n, dtype=torch.float64) for n in sizes))
    H = truth.H[S][:, S] * keep
    Sigma = oracle.posterior(H, torch.full((len(S),), truth.precision, dtype=torch.float64))
    assert_close(posterior.curvature.to_dense(), H)
    assert_close(posterior.outputs(truth.x).cov, oracle.functional_cov(truth.jacobian[1][..., S], Sigma))


def test_sampled_weights_move_the_selected_entries_only() -> None:
    model = mlp(2, 5, 1)
    S, x = some(21, 6), regression()[0]
    posterior = fit(model, lw.Subnetwork(indices=S))
    thetas = posterior.sample(3, torch.Generator().manual_seed(1))
    draws = posterior.linearised.outputs_at(as_input(x), thetas.double())
    for theta, found in zip(thetas, draws, strict=True):
        moved = oracle.theta(model).clone()
        moved[S] = theta
        tensors, start = {}, 0
        for name, p in model.named_parameters():
            tensors[name] = moved[start : start + p.numel()].reshape(p.shape)
            start += p.numel()
        assert_close(found, torch.func.functional_call(model, tensors, x).detach(), rtol=1e-14)
    assert posterior.predict(x, predictive="bnn", n_samples=5).variance.shape == (12, 1)


def test_products_with_the_jacobian_agree_however_they_are_made() -> None:
    truth = Truth.of(by_name("layer-norm"))
    S = some(truth.H.shape[0], 9)
    linearised = truth.fit(params=lw.Subnetwork(indices=S)).linearised
    v = torch.randn(2, len(S), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with linearised.trace(as_input(truth.x)) as trace:
        expected = torch.einsum("nkp,sp->snk", truth.jacobian[1][..., S], v)
        for product in (jvp.jvp_by_rows, jvp.forward_mode, jvp.double_reverse):
            assert_close(product(trace, v), expected)
        total, u = torch.zeros(len(S), dtype=torch.float64), torch.ones_like(trace.f)
        trace.add_vjp_(total, u)
    assert_close(total, truth.jacobian[1][..., S].sum((0, 1)))


def test_the_exact_hessian_is_that_of_the_selected_weights() -> None:
    model, S = mlp(2, 3, 1), some(13, 5)
    whole = lw.exact_hessian(fit(model, "all"), regression()).matrix
    assert_close(lw.exact_hessian(fit(model, lw.Subnetwork(indices=S)), regression()).matrix, whole[S][:, S])


# --- identities ------------------------------------------------------------------------------------------------


def test_all_weights_are_full_laplace_and_those_of_the_last_layer_its_own() -> None:
    model, x = mlp(2, 5, 3, 1), regression()[0]
    pairs = [
        (fit(model, "all", structure="full"), fit(model, lw.Subnetwork(k=37))),
        (fit(model, "last_layer", structure="full"), fit(model, lw.Subnetwork("last_layer"))),
        (fit(model, "last_layer", structure="full"), fit(model, lw.Subnetwork(k=4, among="last_layer"))),
    ]
    for whole, sub in pairs:
        assert_close(sub.outputs(x).cov, whole.outputs(x).cov)
        assert_close(sub.log_evidence(), whole.log_evidence())
        assert_close(sub.covariance(), whole.covariance())


def test_nested_subnetworks_are_ordered_and_conditional_variance_is_below_marginal() -> None:
    model, x = mlp(2, 5, 1), regression()[0]
    order = torch.randperm(21, generator=torch.Generator().manual_seed(3))
    covs = [fit(model, lw.Subnetwork(indices=order[:k].sort().values)).joint_outputs(x).cov for k in (3, 8, 15, 21)]
    for smaller, larger in pairwise(covs):
        assert float(torch.linalg.eigvalsh(larger - smaller)[0]) >= -1e-10
    S = order[:8].sort().values
    marginal = fit(model, "all").covariance()[S][:, S]
    assert float(torch.linalg.eigvalsh(marginal - fit(model, lw.Subnetwork(indices=S)).covariance())[0]) >= -1e-10


def test_no_weights_leave_the_network() -> None:
    model, x = mlp(2, 5, 1), regression()[0]
    posterior = fit(model, lw.Subnetwork(k=0))
    assert_close(posterior.predict(x).mean, model(x).detach())
    assert not posterior.outputs(x).var.any()
    assert posterior.sample(2).shape == (2, 0)
    assert_close(posterior.log_evidence(), posterior.log_lik())
    assert "0 of 21 weights" in str(posterior.diagnose())
    for options in ({"structure": "diag"}, {"prior": lw.prior(model, groups="layer")}):
        assert not fit(model, lw.Subnetwork(k=0), **options).outputs(x).var.any()


# --- scores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_largest_variances_are_nearest_in_wasserstein_distance(k: int) -> None:
    """W₂² between N(θ, diag v) and the same with some variances zero, over every subset of ten weights."""
    model = mlp(2, 2, 1)[:1].append(nn.Tanh()).append(nn.Linear(2, 1).double())
    p = sum(q.numel() for q in model.parameters())
    variance = fit(model, "all", structure="diag").marginal_variance()
    costs = {S: float(variance.sum() - variance[list(S)].sum()) for S in combinations(range(p), k)}
    chosen = fit(model, lw.Subnetwork(k=k))
    assert p <= 10
    assert tuple(_positions(chosen, model)) == min(costs, key=costs.__getitem__)


def test_scores_are_what_they_say() -> None:
    model, x = mlp(2, 5, 1), regression()[0]
    J = oracle.jacobian(model, x)[1]
    variance = 1 / ((J**2).sum((0, 1)) / 0.3**2 + 1.3)
    scores = {
        "variance": variance,
        "diag_laplace": variance,
        "functional": (J**2).sum((0, 1)) * variance,
        "magnitude": oracle.theta(model).abs(),
    }
    for word, values in scores.items():
        expected = values.argsort(descending=True)[:7].sort().values
        assert torch.equal(_positions(fit(model, lw.Subnetwork(word, 7)), model), expected)


def test_random_weights_follow_the_generator() -> None:
    model = mlp(2, 5, 1)
    first, again, other = (
        _positions(fit(model, lw.Subnetwork("random", 7), generator=torch.Generator().manual_seed(s)), model)
        for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dead_weights_come_last_are_counted_and_ties_change_nothing() -> None:
    model = mlp(2, 6, 1, activation=nn.ReLU)
    with torch.no_grad():
        model[0].bias[:3] = -1e3  # units that no datum reaches: their 4 weights each have no curvature
    posterior, x = fit(model, lw.Subnetwork(k=13)), regression()[0]
    diagonal = fit(model, "all", structure="diag").curvature.diagonal()
    dead = int((diagonal == 0).sum())
    assert dead >= 12
    assert not (posterior.curvature.diagonal() == 0).any()
    assert f"{dead} of 25 have no curvature and are ranked last" in str(posterior.diagnose())
    alive = (diagonal > 0).nonzero()[:, 0]
    silent = (diagonal == 0).nonzero()[:, 0]
    # Which of the tied dead weights are taken makes no difference.
    one, other = (torch.cat([alive, some_dead]).sort().values for some_dead in (silent[:4], silent[-4:]))
    assert_close(*(fit(model, lw.Subnetwork(indices=S)).outputs(x).cov for S in (one, other)))
    every = fit(model, lw.Subnetwork(k=25))
    assert f"of those taken, {dead} have no curvature" in str(every.diagnose())


def test_weights_only_leaves_out_biases_and_norms() -> None:
    model = nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)).double()
    posterior = fit(model, lw.Subnetwork(k=15, weights_only=True))
    assert posterior.layout.names == ("0.weight", "3.weight")


def test_swag_variance_is_that_of_plain_training() -> None:
    model, (x, y) = mlp(2, 3, 1), regression()
    swag = lw.Swag(learning_rate=0.05, n_snapshots=6)
    posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=1.0), params=lw.Subnetwork(swag, 5))
    copy = mlp(2, 3, 1)
    copy.load_state_dict(model.state_dict())
    optimiser = torch.optim.SGD(copy.parameters(), 0.05, momentum=0.9, weight_decay=3e-4)
    snapshots = []
    for _ in range(6):
        optimiser.zero_grad()
        (0.5 * (copy(x) - y).square().mean()).backward()
        optimiser.step()
        snapshots.append(oracle.theta(copy))
    variance = torch.stack(snapshots).var(0, correction=0)
    assert torch.equal(_positions(posterior, model), variance.argsort(descending=True)[:5].sort().values)


def test_running_variance_does_not_cancel() -> None:
    values = 1e8 + torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    running = RunningVariance()
    for row in values:
        running.add(row)
    centred = values - 1e8
    assert_close(running.variance, centred.var(0, correction=0), rtol=1e-4)
    raw = (values**2).mean(0) - values.mean(0) ** 2
    assert float((raw - running.variance).abs().max()) > float(running.variance.max())  # what the recursion is for


def test_training_for_swag_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 3)).train()
    model[0].weight.grad = torch.ones(4, 2)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(9, 2), torch.arange(9) % 3), batch_size=4, shuffle=True
    )
    stir()
    with untouched(model):
        lw.fit(model, data, "classification", params=lw.Subnetwork(lw.Swag(n_snapshots=3), 6))
    with untouched(model), pytest.raises(lw.NumericalError, match="SWAG diverged"):
        lw.fit(model, data, "classification", params=lw.Subnetwork(lw.Swag(learning_rate=1e30), 6))


# --- priors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["one", "layer", "tensor", "element"])
def test_grouped_priors_are_restricted_to_the_selection(groups: str) -> None:
    model, x = mlp(2, 5, 1), regression()[0]
    whole = lw.prior(model, groups=groups)
    whole = whole.with_precisions(0.5 + torch.rand(len(whole.precisions), dtype=torch.float64))
    S = some(21, 9)
    posterior = fit(model, lw.Subnetwork(indices=S), prior=whole)
    assert_close(posterior.prior.P0.diagonal, whole.P0.diagonal[S], rtol=1e-15)
    H = oracle.ggn(oracle.jacobian(model, x)[1], torch.eye(1, dtype=torch.float64).expand(12, 1, 1) / 0.09)[S][:, S]
    assert_close(posterior.covariance(), oracle.posterior(H, whole.P0.diagonal[S]))
    again = lw.fit(model, regression(), lw.Gaussian(noise_std=0.3), params=lw.Subnetwork(indices=S))
    assert_close(again.with_prior(whole).covariance(), posterior.covariance())
    if groups == "element":
        names = [f"{n}[{i}]" for n, q in model.named_parameters() for i in range(q.numel())]
        assert posterior.prior.group_names == tuple(names[int(s)] for s in S)


def test_normalised_groups_are_found_for_selected_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)).double()
    S = some(31, 14)
    grouped = lw.prior(model, groups="normalised", data=regression()[0])
    assert len(grouped.group_names) > 1
    posterior = fit(model, lw.Subnetwork(indices=S), prior=grouped)
    assert_close(posterior.prior.P0.diagonal, grouped.P0.diagonal[S], rtol=1e-15)
    tuned = lw.tune(fit(model, lw.Subnetwork(indices=S)), regression(), groups="normalised")
    assert tuned.layout.p == 14
    assert len(tuned.prior.group_names) > 1


def test_prior_scalings() -> None:
    model, x = mlp(2, 5, 1), regression()[0]
    J = oracle.jacobian(model, x)[1]
    grouped = lw.prior(model, groups="layer", precision=[0.7, 1.9])
    found = {s: fit(model, lw.Subnetwork(k=9, prior_scaling=s), prior=grouped) for s in ("none", "count", "jacobian")}
    S = _positions(found["none"], model)
    plain = grouped.P0.diagonal[S]
    assert_close(found["none"].prior.P0.diagonal, plain, rtol=1e-15)
    assert_close(found["count"].prior.P0.diagonal, plain * 9 / 21, rtol=1e-14)
    # "jacobian": the mean prior variance of the outputs is that of the whole network
    whole = ((J**2) / grouped.P0.diagonal).sum(-1).mean()
    assert_close(((J[..., S] ** 2) / found["jacobian"].prior.P0.diagonal).sum(-1).mean(), whole)


def test_a_selection_survives_saving(tmp_path: Path) -> None:
    model, x = mlp(2, 5, 1), regression()[0]
    posterior = fit(model, lw.Subnetwork("functional", 7))
    lw.save(posterior, tmp_path / "net.lapwing")
    again = lw.load(tmp_path / "net.lapwing", model)
    assert again.layout == posterior.layout
    assert again.layout.selected_by == posterior.layout.selected_by
    assert torch.equal(again.outputs(x).cov, posterior.outputs(x).cov)


def test_plan_offers_what_a_subnetwork_can_have() -> None:
    plan = lw.plan(mlp(2, 5, 1), regression(), "regression", params=lw.Subnetwork("swag", 9))
    asked = [row for row in plan.rows if row.params == "as asked"]
    offered = {row.structure for row in asked}
    assert {"full", "block", "diag"} <= offered
    assert not {"kron", "ekfac"} & offered
    assert {row.p for row in asked} == {9}
    assert plan.chosen is not None
    assert plan.chosen.structure == "full"


def test_layouts_compare_and_restrict() -> None:
    layout = fit(mlp(2, 5, 1), "all").layout
    one, other = layout.selected(torch.tensor([1, 12, 20])), layout.selected(torch.tensor([1, 12, 19]))
    assert one == layout.selected(torch.tensor([1, 12, 20]))
    assert one != other
    assert one != layout
    assert one.names == ("0.weight", "0.bias", "2.bias")
    assert {name: one.entries(name).tolist() for name in one} == {"0.weight": [1], "0.bias": [2], "2.bias": [0]}
    assert one.restricted(["0.bias"]) == layout.selected(torch.tensor([12]))
    assert one.selected(torch.tensor([0, 2])) == layout.selected(torch.tensor([1, 20]))
    theta = torch.arange(3.0)
    assert torch.equal(one.ravel(one.unravel(theta)), theta)


def _positions(posterior: lw.Posterior, model: nn.Module) -> Tensor:
    """Where the selected weights stand among all trainable ones."""
    starts, start = {}, 0
    for name, q in model.named_parameters():
        starts[name], start = start, start + q.numel()
    return torch.cat([posterior.layout.entries(name) + starts[name] for name in posterior.layout])


@pytest.mark.slow
def test_two_thousand_weights_of_a_residual_network_without_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    built = workloads.build("W4").smaller(32)
    spread = torch.arange(2000) * (built.n_parameters // 2000)
    # No layer's columns are written out whole, not even those of one datum.
    monkeypatch.setattr(FactorBlock, "matrices", lambda _: pytest.fail("all columns of a layer were formed"))
    with AllocationCounter() as counter:
        posterior = lw.fit(
            built.model, built.batches, "classification", params=lw.Subnetwork(indices=spread), memory="250MB"
        )
    assert counter.peak < 0.25 * 4 * 32 * 10 * built.n_parameters
    assert posterior.outputs(built.x[:4]).var.isfinite().all()
