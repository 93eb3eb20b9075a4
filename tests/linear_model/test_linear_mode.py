"""The evidence at the linear model's own mode: the mode, its evidence, the hyperparameters it leads to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.api.tune import _most_stored
from lapwing.data import as_batches, as_input
from lapwing.data.targets import encoded_batches
from lapwing.linear_model import PRECISE, Expansion, design, in_fixed_order, is_stored
from lapwing.network.products.jvp import choose_jvp, double_reverse, forward_mode, jvp_by_rows, together
from lapwing.tuning.evidence.joint import find_mode
from lapwing.tuning.evidence.log_det import DenseLogDet, KernelLogDet
from lapwing.tuning.evidence.target import DenseTarget, FixedModeTarget, SpectralTarget, target
from lapwing.tuning.evidence.traced import TracedTarget
from oracle import assert_close

STRUCTURES = ["full", "block", "kron", "ekfac", "diag"]


def problem(kind: str, n: int = 24, c: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    """A network far from a mode: random weights, as if training had stopped early."""
    g = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, c)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=g, dtype=torch.float64))
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    signal = torch.stack([torch.sin(2 * x[:, 0]), x[:, 1] * x[:, 0]], 1)[:, :c]
    noisy = signal + 0.2 * torch.randn(n, c, generator=g, dtype=torch.float64)
    y = {
        "regression": noisy,
        "classification": noisy.argmax(1),
        "multilabel": (noisy > 0).double(),
        "count": torch.poisson(signal.exp(), generator=g),
    }[kind]
    return model, x, y


KINDS = {"regression": "gaussian", "classification": "categorical", "multilabel": "bernoulli", "count": "poisson"}


def log_joint(kind: str, model: nn.Module, x: Tensor, y: Tensor, theta: Tensor, delta: Tensor, noise: float) -> Tensor:
    """log p(D | θ) − ½ θᵀ P₀ θ of the linear model, by the oracle."""
    f, J = oracle.jacobian(model, x)
    h = f + J @ (theta - oracle.theta(model))
    targets = oracle.target_sites(KINDS[kind], y, oracle.site_index((h.shape[1],)))
    options = {"noise_std": noise} if kind == "regression" else {}
    return oracle.log_lik(KINDS[kind], h[:, None], targets, **options) - 0.5 * (delta * theta**2).sum()


def brute_mode(kind: str, model: nn.Module, x: Tensor, y: Tensor, delta: Tensor, noise: float) -> Tensor:
    """By SciPy, then Newton with the dense Hessian of the objective."""

    def loss(theta: Tensor) -> Tensor:
        return -log_joint(kind, model, x, y, theta, delta, noise)

    def both(theta: Tensor) -> tuple[float, object]:
        leaf = torch.as_tensor(theta).requires_grad_()
        value = loss(leaf)
        return float(value.detach()), torch.autograd.grad(value, leaf)[0].numpy()

    theta = torch.as_tensor(minimize(both, oracle.theta(model).numpy(), jac=True, method="BFGS").x)
    for _ in range(5):
        g = torch.autograd.functional.jacobian(loss, theta)
        theta = theta - torch.linalg.solve(torch.autograd.functional.hessian(loss, theta), g)
    return theta


def modes(posterior: lw.Posterior, x: Tensor, y: Tensor, most_floats: int = 1 << 30) -> Tensor:
    batches = in_fixed_order(posterior.source)
    source = partial(encoded_batches, batches, posterior.likelihood, posterior.sites, progress=False)
    data = design(posterior.linearised, source, n=len(x), most_floats=most_floats)
    return find_mode(posterior, data, PRECISE).theta


# --- the mode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_mode_is_the_minimiser(kind: str, structure: str):
    model, x, y = problem(kind)
    likelihood = lw.Gaussian(noise_std=0.3) if kind == "regression" else kind
    posterior = lw.fit(
        model, (x, y), likelihood, prior=lw.prior(model, [0.4, 2.0], groups="layer"), structure=structure
    )
    theta = modes(posterior, x, y)
    delta = posterior.prior.P0.diagonal
    gradient = torch.autograd.functional.jacobian(lambda t: log_joint(kind, model, x, y, t, delta, 0.3), theta)
    assert float(gradient.norm()) < 1e-8
    assert_close(theta, brute_mode(kind, model, x, y, delta, 0.3), rtol=1e-7)


def test_one_datum():
    model, x, y = problem("classification", n=1)
    posterior = lw.fit(model, (x, y), "classification", prior=0.5, structure="full")
    delta = posterior.prior.P0.diagonal
    assert_close(modes(posterior, x, y), brute_mode("classification", model, x, y, delta, 1.0), rtol=1e-7)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_without_a_label_there_is_nothing_to_tune(structure: str):
    model, x, y = problem("classification")
    posterior = lw.fit(model, (x, torch.full_like(y, -100)), "classification", structure=structure)
    assert float(lw.tune(posterior).log_evidence()) == 0.0


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_visiting_the_network_anew_gives_the_stored_mode(kind: str):
    model, x, y = problem(kind)
    likelihood = lw.Gaussian(noise_std=0.3) if kind == "regression" else kind
    posterior = lw.fit(model, (x, y), likelihood, structure="kron")
    assert_close(modes(posterior, x, y, most_floats=1), modes(posterior, x, y), rtol=1e-7)


def test_a_shuffling_loader_changes_nothing():
    model, x, y = problem("classification")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True)
    posterior = lw.fit(model, loader, "classification", structure="kron")
    assert_close(
        modes(posterior, x, y, most_floats=1),
        modes(lw.fit(model, (x, y), "classification", structure="kron"), x, y),
        rtol=1e-6,
    )


def test_the_order_of_the_data_is_fixed_without_changing_them():
    _, x, y = problem("classification")
    data = torch.utils.data.TensorDataset(x, y)
    make = torch.utils.data.DataLoader
    shuffled = [make(data, 5, shuffle=True), make(data, 5, sampler=torch.utils.data.RandomSampler(data, True, 24))]
    for source in ([(x, y)], (x, y), make(data, 5), *shuffled):
        batches = in_fixed_order(as_batches(source))
        first, second = ([b[0].args[0] for b in batches] for _ in range(2))
        assert_close(torch.cat(first), torch.cat(second))
        assert len(torch.cat(first)) == 24
    whole = torch.cat([b[0].args[0] for b in in_fixed_order(as_batches(shuffled[0]))])
    assert_close(whole, x)


class Attentive(nn.Module):
    """Fused attention has no forward-mode derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :, None] * torch.ones(4, dtype=x.dtype)
        return self.out(self.inner(tokens, tokens, tokens)[0].mean(1))


@pytest.mark.parametrize(
    "make", [lambda: problem("regression")[0], Attentive, lambda: nn.utils.weight_norm(nn.Linear(2, 2))]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_every_way_to_push_forward_agrees(make, seed: int):
    model = make().double()
    x = torch.randn(5, 2, dtype=torch.float64)
    linearised = lw.fit(model, (x, torch.zeros(5, 2, dtype=torch.float64)), lw.Gaussian(noise_std=1.0)).linearised
    v = torch.randn(3, linearised.layout.p, dtype=torch.float64)
    _, J = oracle.jacobian(model, x)
    truth = torch.einsum("nkp,mp->mnk", J, v)
    assert choose_jvp(linearised, as_input(x)) in (together, forward_mode, double_reverse)
    with linearised.trace(as_input(x)) as trace:
        for way in (choose_jvp(linearised, as_input(x)), double_reverse, jvp_by_rows):
            assert_close(way(trace, v), truth)


# --- its evidence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_evidence_at_the_mode_is_the_marginal_likelihood(seed: int):
    """log N(y; f − J θ̃, J P₀⁻¹ Jᵀ + σ² I), wherever the network was linearised."""
    model, x, y = problem("regression")
    g = torch.Generator().manual_seed(seed)
    precisions = (2 * torch.randn(2, generator=g, dtype=torch.float64)).exp()
    posterior = at_linear_mode(model, x, y, 0.3).with_prior(lw.prior(model, precisions, groups="layer"))
    f, J = oracle.jacobian(model, x)
    J = J.flatten(0, 1)
    cov = J @ torch.diag(1 / posterior.prior.P0.diagonal) @ J.T + 0.09 * torch.eye(len(J), dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(f.flatten() - J @ oracle.theta(model), cov).log_prob(y.flatten())
    assert_close(posterior.log_evidence(), exact, rtol=1e-10)


def at_linear_mode(model: nn.Module, x: Tensor, y: Tensor, noise: float) -> lw.Posterior:
    fitted = lw.fit(model, (x, y), lw.Gaussian(noise_std=noise), structure="full")
    return lw.tune(fitted, (x, y), mode="linear")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_evidence_is_that_of_its_own_dense_matrix(kind: str, structure: str):
    """(A2) with the structure's own H as a dense matrix and the true mode."""
    model, x, y = problem(kind)
    fitted = lw.fit(model, (x, y), kind, structure=structure)
    tuned = lw.tune(fitted, (x, y))
    delta, theta = tuned.prior.P0.diagonal, tuned.linear_mode()
    noise = float(tuned.likelihood.resolved()) if kind == "regression" else 1.0
    whitened = tuned.curvature.to_dense() / (delta.sqrt()[:, None] * delta.sqrt())
    occam = torch.logdet(torch.eye(len(delta), dtype=torch.float64) + whitened)
    assert_close(tuned.log_evidence(), log_joint(kind, model, x, y, theta, delta, noise) - 0.5 * occam, rtol=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_gradient_is_that_of_the_refitted_evidence(kind: str, structure: str):
    """The envelope theorem: hold θ_*, or find it anew on both sides of a finite difference."""
    model, x, y = problem(kind)
    likelihood = lw.Gaussian(noise_std=0.3) if kind == "regression" else kind
    prior = lw.prior(model, [0.7, 1.4], groups="layer")
    posterior = lw.fit(model, (x, y), likelihood, prior=prior, structure=structure)
    logs, tuned = prior.precisions.log(), lw.tune(posterior, (x, y))

    def refitted(log_precisions: Tensor) -> lw.Posterior:
        moved = posterior.with_prior(prior.with_precisions(log_precisions.exp()))
        expansion = replace(tuned.expansion, theta=modes(moved, x, y), follows=False)
        source = lambda: encoded_batches(moved.source, moved.likelihood, moved.sites, progress=False)  # noqa: E731
        data = design(moved.linearised, source, n=len(x), most_floats=1 << 30)
        return replace(moved, expansion=replace(expansion, statistics=find_mode(moved, data, PRECISE).statistics))

    leaf = logs.clone().requires_grad_()
    at = refitted(logs)
    gradient = torch.autograd.grad(at.with_prior(prior.with_precisions(leaf.exp())).log_evidence(), leaf)[0]
    for i in range(2):
        e = 1e-4 * torch.eye(2, dtype=torch.float64)[i]
        difference = (refitted(logs + e).log_evidence() - refitted(logs - e).log_evidence()) / 2e-4
        assert float(gradient[i]) == pytest.approx(float(difference), rel=1e-5, abs=1e-6)


# --- what it leads to -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_tuned_is_a_joint_stationary_point(kind: str, structure: str):
    """δ = γ/‖θ_*‖², σ² = SSE(θ_*)/(NC − γ), and θ_* is the mode for them; both routes end there."""
    model, x, y = problem(kind, n=80)
    fitted = lw.fit(model, (x, y), kind, structure=structure)
    tuned = {by: lw.tune(fitted, (x, y), by=by) for by in ("evidence", "fixed_point")}
    for posterior in tuned.values():
        theta, gamma = posterior.linear_mode(), float(posterior.effective_dimension())
        assert float(posterior.prior.precisions) == pytest.approx(gamma / float(theta @ theta), rel=1e-6)
        assert_close(theta, modes(posterior, x, y), rtol=1e-6)
        if kind == "regression":
            f, J = oracle.jacobian(model, x)
            sse = float((y - f - J @ (theta - oracle.theta(model))).square().sum())
            assert float(posterior.likelihood.resolved()) ** 2 == pytest.approx(sse / (y.numel() - gamma), rel=1e-6)
    assert_close(tuned["evidence"].prior.precisions, tuned["fixed_point"].prior.precisions, rtol=1e-5)


def test_it_is_the_maximum_of_the_exact_evidence():
    model, x, y = problem("regression", n=40)
    tuned = lw.tune(lw.fit(model, (x, y), "regression", structure="full"), (x, y))
    noise = float(tuned.likelihood.resolved())
    for factor in (0.7, 0.95, 1.05, 1.4):
        elsewhere = tuned.with_prior(tuned.prior.with_precisions(factor * tuned.prior.precisions))
        assert float(elsewhere.log_evidence()) < float(tuned.log_evidence())
        noisier = tuned.with_likelihood(lw.Gaussian(noise_std=factor * noise))
        assert float(noisier.log_evidence()) < float(tuned.log_evidence())


def test_the_trained_weights_lead_elsewhere():
    """Plugging the trained weights in for θ_* is another answer, on a network that is at no mode."""
    model, x, y = problem("regression", n=40)
    fitted = lw.fit(model, (x, y), "regression", structure="full")
    linear, network = lw.tune(fitted, (x, y), mode="linear"), lw.tune(fitted, (x, y), mode="network")
    assert abs(float(linear.prior.precisions.log() - network.prior.precisions.log())) > 0.3
    assert network.expansion is None and linear.expansion is not None


def test_data_may_be_left_out_after_fit_but_not_if_they_are_unknown():
    model, x, y = problem("classification")
    fitted = lw.fit(model, (x, y), "classification", structure="kron")
    assert_close(lw.tune(fitted).prior.precisions, lw.tune(fitted, (x, y)).prior.precisions)
    with pytest.raises(lw.InputError, match="training data"):
        lw.tune(replace(fitted, source=None))


def test_other_data_than_were_fitted_are_refused():
    model, x, y = problem("classification")
    fitted = lw.fit(model, (x, y), "classification", structure="kron")
    with pytest.raises(lw.InputError, match="24 data"):
        lw.tune(fitted, (x[:10], y[:10]))


def test_derivatives_with_fewer_rows_than_parameters():
    model, x, y = problem("regression", n=6)
    prior = lw.prior(model, [0.8, 2.0, 0.3, 1.1], groups="tensor")
    posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.4), prior=prior, structure="full")
    check_derivatives(posterior, FixedModeTarget)


def test_derivatives_with_rows_of_different_weights():
    model, x, y = problem("regression", n=6)
    prior = lw.prior(model, [0.8, 2.0, 0.3, 1.1], groups="tensor")
    one, other = (
        lw.fit(model, (x[some], y[some]), lw.Gaussian(noise_std=0.4), prior=prior, structure="full")
        for some in (slice(3), slice(3, 6))
    )
    (first,), (second,) = one.estimate.parts, other.estimate.parts
    weighted = first.mixed([second], torch.tensor([1.0, 2.5], dtype=torch.float64))
    posterior = replace(one, estimate=replace(one.estimate, parts=(weighted,)))
    check_derivatives(posterior, FixedModeTarget)
    assert weighted.scale.ndim == 1 and first.joined([second]).scale.ndim == 0


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_likelihood_scale_of_two_is_every_datum_twice(structure: str, kind: str):
    model, x, y = problem(kind, n=30)
    twice = (torch.cat([x, x]), torch.cat([y, y]))
    scaled = lw.tune(lw.fit(model, (x, y), kind, structure=structure, likelihood_scale=2.0), groups="layer")
    doubled = lw.tune(lw.fit(model, twice, kind, structure=structure), groups="layer")
    assert_close(scaled.linear_mode(), doubled.linear_mode(), rtol=1e-7)
    assert_close(scaled.prior.precisions, doubled.prior.precisions, rtol=1e-7)
    assert_close(scaled.log_evidence(), doubled.log_evidence(), rtol=1e-9)


# --- closed-form derivatives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(
    ("structure", "groups", "kind"),
    [
        ("full", "one", SpectralTarget),
        ("full", "layer", DenseTarget),
        ("kron", "layer", SpectralTarget),
        ("diag", "tensor", SpectralTarget),
    ],
)
def test_derivatives_of_the_evidence(structure: str, groups: str, kind: type, follows: bool):
    """Against autograd through the posterior's own evidence, in log precisions and log noise."""
    model, x, y = problem("regression", n=40)
    prior = lw.prior(model, 0.8, groups=groups)
    posterior = lw.fit(model, (x, y), "regression", prior=prior, structure=structure)
    posterior = replace(
        posterior, expansion=Expansion(posterior.linearised.theta, posterior.estimate.statistics, follows)
    )
    check_derivatives(posterior, kind if follows else FixedModeTarget)


def test_derivatives_of_blocks_of_every_form():
    """Two blocks: fewer rows than weights in one, with several precisions; a matrix in the other."""
    model, x, y = problem("regression", n=9, c=1)
    prior = lw.prior(model, [0.8, 2.0, 0.3, 1.1], groups="tensor")
    posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.4), prior=prior, structure="block")
    found = target(posterior)
    assert isinstance(found, FixedModeTarget)
    assert {type(term) for term in found.log_dets} == {KernelLogDet, DenseLogDet}
    check_derivatives(posterior, FixedModeTarget)


@pytest.mark.parametrize("tune_noise", [True, False])
def test_derivatives_without_a_closed_form(tune_noise: bool):
    """Gradients by reverse mode and their differences are what the closed forms give."""
    model, x, y = problem("regression", n=40)
    prior = lw.prior(model, [0.8, 2.0], groups="layer")
    posterior = lw.fit(model, (x, y), "regression", prior=prior, structure="full")
    closed, traced = target(posterior), TracedTarget(posterior, tune_noise)
    assert closed is not None
    at, n = (prior.precisions.log(), posterior.part_scales.log()), 3 if tune_noise else 2
    assert_close(traced.value(*at), closed.value(*at))
    (gradient, hessian), (exact_gradient, exact_hessian) = traced.derivatives(*at), closed.derivatives(*at)
    assert_close(gradient[:n], exact_gradient[:n])
    assert_close(hessian[:n, :n], exact_hessian[:n, :n], rtol=1e-4)


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["block", "diag"])
def test_the_end_of_tuning_is_sharp(structure: str, kind: str):
    """Sums in another order differ by rounding; where tuning ends differs by no more, with groups switched off too."""
    model, x, y = problem(kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*model[:1], nn.LayerNorm(4), *model[1:]).double()
    pieces = [(x[some], y[some]) for some in torch.arange(len(x)).split([5, 2, 11, len(x) - 18])]
    one, other = (lw.tune(lw.fit(model, data, kind, structure=structure)) for data in ((x, y), pieces))
    assert bool((one.effective_dimension() < 1e-9).any())
    assert_close(other.prior.precisions.log(), one.prior.precisions.log(), rtol=1e-12)
    assert_close(other.log_evidence(), one.log_evidence(), rtol=1e-12)
    assert_close(other.outputs(x[:3]).var, one.outputs(x[:3]).var, rtol=1e-12)


def test_shards_are_tuned_as_sharply_as_the_whole():
    """Their rows together are those of all data, and tuning goes the same way with them."""
    model, x, y = problem("classification", n=6)
    shards = [lw.fit(model, (x[some], y[some]), "classification", structure="full") for some in (slice(2), slice(2, 6))]
    whole = lw.tune(lw.fit(model, (x, y), "classification", structure="full"), groups="layer")
    merged = lw.tune(lw.merge(shards), (x, y), groups="layer")
    ratios = merged.prior.precisions / whole.prior.precisions
    assert_close(ratios, torch.ones_like(ratios), rtol=1e-13)
    assert_close(merged.linear_mode(), whole.linear_mode(), rtol=1e-13)


def check_derivatives(posterior: lw.Posterior, kind: type) -> None:
    closed, prior = target(posterior), posterior.prior
    assert type(closed) is kind
    u, w = prior.precisions.log() + 0.3, posterior.part_scales.log() - 0.2

    def through_the_posterior(z: Tensor) -> Tensor:
        moved = posterior.with_prior(prior.with_precisions(z[:-1].exp()))
        return moved.with_likelihood(moved.likelihood.with_noise_std((-0.5 * z[-1:]).exp())).log_evidence()

    z = torch.cat([u, w])
    gradient, hessian = closed.derivatives(u, w)
    assert_close(closed.value(u, w), through_the_posterior(z), rtol=1e-10)
    assert_close(gradient, torch.autograd.functional.jacobian(through_the_posterior, z), rtol=1e-7)
    assert_close(hessian, torch.autograd.functional.hessian(through_the_posterior, z), rtol=1e-6)


def test_predictions_around_the_network_have_the_noise_of_its_residuals():
    model, x, y = problem("regression", n=40)
    tuned = lw.tune(lw.fit(model, (x, y), "regression", structure="full"), (x, y))
    sse, gamma = float((y - model(x)).square().sum()), float(tuned.effective_dimension())
    noise_var = float(tuned.likelihood.resolved()) ** 2
    assert sse / (y.numel() - gamma) > 1.2 * noise_var  # the network is at no mode
    assert_close(tuned.predict(x).aleatoric, torch.full_like(y, sse / (y.numel() - gamma)))
    at_mode = lw.tune(lw.fit(model, (x, y), "regression", structure="full"), (x, y), predictive_mean="linear_mode")
    assert_close(at_mode.predict(x).aleatoric, torch.full_like(y, noise_var))
    set_by_hand = tuned.with_likelihood(lw.Gaussian(noise_std=0.5))
    assert_close(set_by_hand.predict(x).aleatoric, torch.full_like(y, 0.25))


def test_a_small_budget_keeps_no_jacobian():
    """memory= of fit holds for tune: without room for J the network is visited anew, and the search ends early."""
    model, x, y = problem("classification", n=80)
    fitted = lw.fit(model, (x, y), "classification", structure="kron")
    tight, roomy = replace(fitted, chunk_floats=1), fitted
    assert is_stored(80 * 3, fitted.layout.p, _most_stored(roomy), inf)
    assert not is_stored(80 * 3, fitted.layout.p, _most_stored(tight), inf)
    streamed, stored = (lw.tune(each, (x, y), budget="exact") for each in (tight, roomy))
    assert streamed.expansion.search.relative_gradient < 1e-5
    assert stored.expansion.search.relative_gradient < 1e-9
    assert abs(float(streamed.prior.precisions.log() - stored.prior.precisions.log())) < 1
