"""Refinement: the linear model's mode in every structure, and Gaussian variational posteriors of the linear model."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import lapwing as lw
import oracle
from lapwing.api.refine import _IMMER2021
from lapwing.data.targets import encoded_batches
from lapwing.posterior import Readout
from lapwing.predictive.links import sobol_normal
from lapwing.refinement import (
    Adam,
    Ascent,
    CountedPasses,
    DiagonalCovariance,
    FullCovariance,
    SampledSteps,
    refine_variational,
)
from lapwing.refinement.covariances import Covariance, FunctionFactor
from lapwing.refinement.expectations import SoftmaxOutputs, expectation
from lapwing.refinement.laplace import refine_laplace
from lapwing.refinement.model import LinearModel, gathered
from lapwing.refinement.newton import mode_in_functions, mode_in_weights
from lapwing.refinement.variational import VariationalProblem, ascend
from oracle import assert_close
from test_linear_mode import KINDS, STRUCTURES, log_joint, problem
from untouched import stir, untouched

NOISE = 0.3


def fitted(
    kind: str, structure: object = "full", n: int = 24, **options: object
) -> tuple[lw.Posterior, Tensor, Tensor]:
    model, x, y = problem(kind, n=n)
    likelihood = lw.Gaussian(noise_std=NOISE) if kind == "regression" else kind
    prior = lw.prior(model, [0.4, 2.0], groups="layer")
    return lw.fit(model, (x, y), likelihood, prior=prior, structure=structure, **options), x, y


def logistic(alpha: float = 1.0) -> tuple[lw.Posterior, Tensor, Tensor]:
    """Seven nodes of a logistic regression on (w, b) whose posterior is known to many digits."""
    x = torch.tensor([-2, -1, -0.5, 0.5, 1, 2, 3], dtype=torch.float64)[:, None]
    y = torch.tensor([0, 0, 1, 0, 1, 1, 1], dtype=torch.float64)
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.fill_(-0.4)
    return lw.fit(model, (x, y), "binary", prior=alpha, structure="full"), x, y


def source(posterior: lw.Posterior) -> CountedPasses:
    assert posterior.source is not None
    return CountedPasses(
        lambda: encoded_batches(posterior.source, posterior.likelihood, posterior.sites, progress=False)
    )


def linear_model(posterior: lw.Posterior) -> LinearModel:
    return gathered(posterior, source(posterior))


class At(NamedTuple):
    """The linear model at some weights, by the oracle."""

    J: Tensor
    h: Tensor
    Lambda: Tensor
    log_lik: Tensor
    gradient: Tensor


def at_weights(kind: str, posterior: lw.Posterior, x: Tensor, y: Tensor, theta: Tensor) -> At:
    model = posterior.linearised.network.model
    f, J = oracle.jacobian(model, x)
    h = (f + J @ (theta - oracle.theta(model)))[:, None]
    options = {"noise_std": NOISE} if kind == "regression" else {}
    targets = oracle.target_sites(KINDS[kind], y, oracle.site_index((h.shape[-1],)))
    r = oracle.residuals(KINDS[kind], h, targets, **options)[:, 0]
    Lambda = oracle.hessians(KINDS[kind], h, targets, **options)[:, 0]
    log_lik = oracle.log_lik(KINDS[kind], h, targets, **options)
    return At(J, h[:, 0], Lambda, log_lik, torch.einsum("nkp,nk->p", J, r))


# --- Laplace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 24])  # fewer and more outputs than weights
@pytest.mark.parametrize("kind", list(KINDS))
def test_mean_covariance_and_evidence_are_the_linear_models(kind: str, n: int):
    posterior, x, y = fitted(kind, n=n)
    refined, delta = lw.refine(posterior), posterior.prior.P0.diagonal
    at = at_weights(kind, posterior, x, y, refined.mean)
    assert float((at.gradient - delta * refined.mean).abs().max()) < 1e-8  # concave: a zero gradient is the mode
    H = oracle.ggn(at.J, at.Lambda)
    assert_close(refined.covariance(), oracle.posterior(H, delta), rtol=1e-8)
    assert_close(refined.log_evidence(), oracle.log_evidence(at.log_lik, H, delta, refined.mean), rtol=1e-8)
    assert_close(refined.outputs(x).mean, at.h, rtol=1e-8)
    assert_close(refined.outputs(x).cov, oracle.functional_cov(at.J, oracle.posterior(H, delta)), rtol=1e-8)
    assert refined.refinement is not None and refined.refinement.converged


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_has_the_true_mode_and_its_own_curvature_there(structure: str):
    posterior, x, y = fitted("classification", structure)
    refined = lw.refine(posterior)
    assert_close(refined.mean, lw.refine(fitted("classification")[0]).mean, rtol=1e-8)
    at = at_weights("classification", posterior, x, y, refined.mean)
    assert_close(refined.curvature.to_dense(), structured(structure, posterior, x, at), rtol=1e-8)


@pytest.mark.parametrize("structure", ["gp", lw.LowRank(rank=22)], ids=["gp", "lowrank"])
@pytest.mark.parametrize("n", [3, 24])  # fewer and more outputs than weights
def test_function_space_and_all_eigenpairs_are_the_full_posterior(structure: object, n: int):
    full, other = (lw.refine(fitted("classification", kind, n=n)[0]) for kind in ("full", structure))
    x = fitted("classification")[1][:5] + 0.1
    assert_close(other.outputs(x).mean, full.outputs(x).mean, rtol=1e-8)
    assert_close(other.outputs(x).cov, full.outputs(x).cov, rtol=1e-8)
    assert_close(other.log_evidence(), full.log_evidence(), rtol=1e-8)


def structured(structure: str, posterior: lw.Posterior, x: Tensor, at: At) -> Tensor:
    """The structure's share of the dense curvature, by the oracle."""
    H, model = oracle.ggn(at.J, at.Lambda), posterior.linearised.network.model
    sizes, layers = [p.numel() for p in model.parameters()], list(oracle.layers(model, x).values())
    if structure == "kron":
        return oracle.kronecker(H, sizes, layers, at.Lambda)
    if structure == "ekfac":
        corrected = [
            oracle.eigen_corrected(H, *oracle.kronecker_factors(layer, at.Lambda), layer.position) for layer in layers
        ]
        return torch.stack(corrected).sum(0)
    if structure == "block":
        return torch.block_diag(H[:12, :12], H[12:, 12:])
    return H.diagonal().diag() if structure == "diag" else H


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_gaussian_takes_one_full_step(structure: str):
    refined = lw.refine(fitted("regression", structure)[0])
    assert refined.refinement is not None
    assert refined.refinement.n_steps == 1 and refined.refinement.converged


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("n", [3, 24])
def test_dual_equals_primal(kind: str, n: int):
    posterior, *_ = fitted(kind, n=n)
    model = linear_model(posterior)
    primal, dual = mode_in_weights(model), mode_in_functions(model)
    assert primal.converged and dual.converged
    assert_close(dual.theta, primal.theta, rtol=1e-8)
    assert_close(dual.path[-1], primal.path[-1], rtol=1e-10)
    # The same evidence from either side: Ψ − ½ log det(I + Sᵀ K S) in function space.
    ratio = FunctionFactor(model, model.hessian_root(model.outputs(dual.theta))).log_det_ratio()
    assert_close(dual.path[-1] - 0.5 * ratio, lw.refine(posterior).log_evidence(), rtol=1e-8)
    for mode in (primal, dual):
        assert all(b >= a - 1e-10 for a, b in zip(mode.path, mode.path[1:], strict=False))


@pytest.mark.parametrize("kind", list(KINDS))
def test_reports_start_at_the_trained_weights(kind: str):
    """Log joint density and its gradient there, by the oracle, whichever way the mode is looked for."""
    posterior, x, y = fitted(kind)
    theta = oracle.theta(posterior.linearised.network.model).requires_grad_()
    start = log_joint(kind, posterior.linearised.network.model, x, y, theta, posterior.prior.P0.diagonal, NOISE)
    (gradient,) = torch.autograd.grad(start, theta)
    model = linear_model(posterior)
    for mode in (mode_in_weights(model), mode_in_functions(model)):
        assert_close(mode.path[0], start, rtol=1e-10)
    ways = [lw.refine(posterior), lw.refine(posterior, memory=8)]
    for report in (refined.refinement for refined in ways):
        assert report is not None
        assert_close(report.path[0], start, rtol=1e-10)
        assert_close(report.gradient_before, gradient.abs().max(), rtol=1e-8)
    if kind != "regression":
        report = lw.refine(posterior, (x, y), by="vi").refinement
        assert report is not None
        assert_close(report.gradient_before, gradient.abs().max(), rtol=1e-8)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_where_the_jacobian_does_not_fit_the_network_is_visited_again(kind: str):
    posterior, *_ = fitted(kind, "kron")
    stored, streamed = lw.refine(posterior), lw.refine(posterior, memory=8)
    assert_close(streamed.mean, stored.mean, rtol=1e-7)
    assert_close(streamed.log_evidence(), stored.log_evidence(), rtol=1e-8)
    assert stored.refinement is not None and streamed.refinement is not None
    assert streamed.refinement.n_passes > stored.refinement.n_passes
    assert_close(streamed.refinement.gradient_before, stored.refinement.gradient_before, rtol=1e-8)


@pytest.mark.parametrize("kind", list(KINDS))
def test_conjugate_gradients_find_the_mode_of_the_factorisation(kind: str, monkeypatch: pytest.MonkeyPatch):
    posterior, *_ = fitted(kind)
    by_factor = lw.refine(posterior)
    monkeypatch.setattr("lapwing.refinement.laplace._MOST_SOLVED", 0)
    assert_close(lw.refine(posterior).mean, by_factor.mean, rtol=1e-7)


class Sequence(nn.Module):
    """Two classes at each of three positions: three terms per datum, classes in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))).reshape(-1, 2, 3)


def test_several_terms_per_datum():
    torch.manual_seed(1)
    model = Sequence().double()
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9, 3))
    posterior = lw.fit(model, (x, y), lw.Categorical(class_axis=1), structure="full")
    refined = lw.refine(posterior)
    f, J = oracle.jacobian(model, x)
    shift = refined.mean - oracle.theta(model)
    index = oracle.site_index((2, 3), 1)
    h = (f + J @ shift)[:, index]
    r = torch.zeros_like(f)
    r[:, index.flatten()] = oracle.residuals("categorical", h, y).reshape(9, -1)
    assert float((torch.einsum("nkp,nk->p", J, r) - refined.mean).abs().max()) < 1e-8
    assert_close(refined.outputs(x).mean.reshape(9, -1), f + J @ shift, rtol=1e-9)
    assert_close(lw.refine(posterior, memory=8).mean, refined.mean, rtol=1e-7)


def test_a_mode_stays_where_it_is():
    posterior, *_ = logistic()
    once = lw.refine(posterior)
    model = once.linearised.network.model
    with torch.no_grad():
        model.weight.fill_(float(once.mean[0]))
        model.bias.fill_(float(once.mean[1]))
    again = lw.refine(lw.fit(model, posterior.source, "binary", structure="full"))
    assert again.refinement is not None and again.refinement.n_steps == 0
    assert again.refinement.gradient_before < 1e-8
    assert_close(again.mean, once.mean)


def test_refining_twice_changes_nothing():
    posterior, *_ = fitted("classification")
    once = lw.refine(posterior)
    twice = lw.refine(once)
    assert_close(twice.mean, once.mean)
    assert_close(twice.covariance(), once.covariance())


@pytest.mark.parametrize(
    ("alpha", "mode", "A"),
    [
        (1.0, (0.84153639, 0.03323085), (3.19830965, 0.18092847, 2.23033330)),
        (0.1, (1.28108262, 0.02006048), (1.26646942, 0.05059777, 1.04535878)),
    ],
)
def test_logistic_values(alpha: float, mode: tuple[float, ...], A: tuple[float, ...]):
    refined = lw.refine(logistic(alpha)[0])
    assert_close(refined.mean, torch.tensor(mode, dtype=torch.float64), rtol=2e-8)
    P = refined.precision.to_dense()
    assert_close(torch.stack([P[0, 0], P[0, 1], P[1, 1]]), torch.tensor(A, dtype=torch.float64), rtol=2e-8)


def test_tempering_scales_the_likelihood_and_never_the_prior():
    """κ = 2 is every datum twice."""
    posterior, x, y = fitted("classification", likelihood_scale=2.0)
    twice, *_ = fitted("classification")
    model = twice.linearised.network.model
    doubled = lw.fit(
        model, (torch.cat([x, x]), torch.cat([y, y])), "classification", prior=twice.prior, structure="full"
    )
    assert_close(lw.refine(posterior).mean, lw.refine(doubled).mean, rtol=1e-8)
    assert_close(lw.refine(posterior).log_evidence(), lw.refine(doubled).log_evidence(), rtol=1e-8)
    for by in ("vi", "vi_diag"):
        once, both = lw.refine(posterior, (x, y), by=by), lw.refine(doubled, [(x, y), (x, y)], by=by)
        assert_close(once.mean, both.mean, rtol=1e-6)
        assert_close(once.covariance(), both.covariance(), rtol=1e-6)


def test_the_published_laplace_is_full_batch_adam():
    posterior, x, y = fitted("classification")
    assert _IMMER2021.laplace == Adam(lr=1e-3, n_steps=1000)
    refined = refine_laplace(posterior, source(posterior), 1 << 20, Adam(lr=1e-3, n_steps=40))
    assert refined.refinement is not None
    assert refined.refinement.n_steps == 40 and not refined.refinement.converged
    f, J = oracle.jacobian(posterior.linearised.network.model, x)
    start = oracle.theta(posterior.linearised.network.model)
    theta = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=1e-3)
    for _ in range(40):
        optimiser.zero_grad()
        log_lik = oracle.log_lik("categorical", (f + J @ (theta - start))[:, None], y[:, None])
        (0.5 * (posterior.prior.P0.diagonal * theta**2).sum() - log_lik).backward()
        optimiser.step()
    assert_close(refined.mean, theta, rtol=1e-8)
    assert any("before convergence" in finding.advice for finding in refined.diagnose().concerns)


# --- variational --------------------------------------------------------------------------------------------------

LOG_EVIDENCE = -4.2750637  # of the logistic regression, by quadrature over both weights


def test_logistic_bounds():
    posterior, *_ = logistic()
    full, diagonal = (lw.refine(posterior, by=by) for by in ("vi", "vi_diag"))
    assert full.refinement is not None and diagonal.refinement is not None
    assert_close(full.mean, torch.tensor([1.01340239, 0.04868818], dtype=torch.float64), rtol=1e-7)
    V = torch.tensor([[0.33045525, -0.03217235], [-0.03217235, 0.48193248]], dtype=torch.float64)
    assert_close(full.covariance(), V, rtol=1e-7)
    bound = full.refinement.bound
    assert bound is not None
    assert (bound.expected_log_lik, bound.kl) == pytest.approx((-3.44940490, 0.84274923), abs=1e-7)
    assert full.refinement.elbo == pytest.approx(-4.29215413, abs=1e-7)
    assert_close(diagonal.mean, torch.tensor([1.01557406, 0.05555571], dtype=torch.float64), rtol=1e-7)
    assert_close(diagonal.covariance().diagonal(), torch.tensor([0.32826346, 0.47876836], dtype=torch.float64), 1e-7)
    assert diagonal.refinement.elbo == pytest.approx(-4.29532722, abs=1e-7)
    assert diagonal.refinement.elbo < full.refinement.elbo < LOG_EVIDENCE
    assert float(lw.refine(posterior).log_evidence()) == pytest.approx(-4.3186, abs=1e-4)  # no bound


@pytest.mark.parametrize("n", [3, 24])  # fewer and more outputs than weights
@pytest.mark.parametrize("noise", [NOISE, [0.2, 0.5]])
def test_a_gaussian_has_its_exact_posterior(n: int, noise: float | list[float]):
    model, x, y = problem("regression", n=n)
    posterior = lw.fit(
        model, (x, y), lw.Gaussian(noise), prior=0.7, structure="kron"
    )  # the fit's structure is no matter
    full, diagonal = (lw.refine(posterior, by=by) for by in ("vi", "vi_diag"))
    f, J = oracle.jacobian(model, x)
    std = torch.as_tensor(noise, dtype=torch.float64)
    mean, cov, log_p = oracle.conjugate_regression(J, y, f - J @ oracle.theta(model), std, 0.7)
    assert_close(full.mean, mean, rtol=1e-8)
    assert_close(full.covariance(), cov, rtol=1e-8)
    assert full.refinement is not None and full.refinement.elbo == pytest.approx(float(log_p), rel=1e-8)
    assert_close(diagonal.mean, mean, rtol=1e-8)
    assert_close(diagonal.marginal_variance(), 1 / torch.linalg.inv(cov).diagonal(), rtol=1e-8)


def brute_elbo(kind: str, posterior: lw.Posterior, x: Tensor, y: Tensor, mu: Tensor, root: Tensor) -> Tensor:
    """E log p by a 24 × 24 Gauss–Hermite rule over the two outputs of each datum, less KL by torch.distributions."""
    model = posterior.linearised.network.model
    f, J = oracle.jacobian(model, x)
    m, R = f + J @ (mu - oracle.theta(model)), J @ root
    V = R @ R.mT
    z, w = (torch.as_tensor(v) for v in np.polynomial.hermite_e.hermegauss(24))
    z, w = torch.cartesian_prod(z, z), torch.cartesian_prod(w, w).prod(-1) / w.sum() ** 2
    h = m + torch.einsum("ncd,qd->qnc", torch.linalg.cholesky(V), z)
    targets = oracle.target_sites(KINDS[kind], y, oracle.site_index((2,)))
    repeated = targets.repeat(len(h), *[1] * (targets.ndim - 1))
    expected = w @ oracle.log_prob(KINDS[kind], h.reshape(-1, 1, 2), repeated).reshape(len(h), -1).sum(-1)
    prior = MultivariateNormal(torch.zeros_like(mu), precision_matrix=posterior.prior.P0.diagonal.diag())
    return expected - kl_divergence(MultivariateNormal(mu, scale_tril=root), prior)


@pytest.mark.parametrize("n", [4, 24])  # fewer and more outputs than weights
@pytest.mark.parametrize("kind", ["classification", "multilabel", "count"])
def test_the_bound_and_its_maximum_are_those_of_brute_force(kind: str, n: int):
    posterior, x, y = fitted(kind, n=n)
    for by in ("vi", "vi_diag"):
        refined = lw.refine(posterior, by=by)
        mu = refined.mean.clone().requires_grad_()
        root = torch.linalg.cholesky(refined.covariance()).requires_grad_()
        value = brute_elbo(kind, posterior, x, y, mu, root)
        assert refined.refinement is not None and refined.refinement.converged
        assert refined.refinement.elbo == pytest.approx(float(value.detach()), abs=1e-6)
        g_mu, g_root = torch.autograd.grad(value, (mu, root))
        assert float(torch.linalg.eigvalsh(refined.covariance())[0]) > 0
        free = torch.tril(g_root) if by == "vi" else g_root.diagonal()
        assert float(g_mu.abs().max()) < 1e-5 and float(free.abs().max()) < 1e-5


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_full_covariance_bounds_better_than_a_diagonal_one(kind: str):
    posterior, *_ = fitted(kind)
    full, diagonal = (lw.refine(posterior, by=by).refinement for by in ("vi", "vi_diag"))
    assert full is not None and full.elbo is not None and diagonal is not None and diagonal.elbo is not None
    assert full.elbo >= diagonal.elbo
    for report in (full, diagonal):
        assert all(b >= a - 1e-7 for a, b in zip(report.path, report.path[1:], strict=False))


def variational_problem(posterior: lw.Posterior, covariance: Covariance) -> VariationalProblem:
    model = linear_model(posterior)
    rule = expectation(model.likelihood, model.f.shape[1], model.y, generator=torch.Generator())
    return VariationalProblem(model, covariance, rule)


@pytest.mark.parametrize("covariance", [FullCovariance(), DiagonalCovariance()])
def test_short_steps_climb_too(covariance: Covariance):
    given = variational_problem(logistic()[0], covariance)
    start = given.iterate(given.model.theta, given.model.hessian(given.model.f))
    end = ascend(given, start, Ascent(longest=0.1, most_steps=60))
    assert all(b >= a - 1e-12 for a, b in zip(end.path[5:], end.path[6:], strict=False))


@pytest.mark.parametrize(
    ("covariance", "rho"), [(FullCovariance(), 1e-2), (DiagonalCovariance(), 1e-3)], ids=["vi", "vi_diag"]
)
def test_the_published_steps(covariance: Covariance, rho: float):
    preset = _IMMER2021.vi if covariance == FullCovariance() else _IMMER2021.vi_diag
    assert preset.covariance == covariance and preset.steps == SampledSteps(rho, 250)
    posterior, x, y = fitted("classification")
    way, rho = replace(preset, steps=SampledSteps(10 * rho, 30)), 10 * rho
    refined = refine_variational(posterior, source(posterior), 1 << 20, way, generator=torch.Generator().manual_seed(5))
    delta, generator = posterior.prior.P0.diagonal, torch.Generator().manual_seed(5)
    start = oracle.theta(posterior.linearised.network.model)
    mu, at = start, at_weights("classification", posterior, x, y, start)
    keep = (lambda H: H) if covariance == FullCovariance() else (lambda H: H.diagonal().diag())
    P, f = keep(oracle.ggn(at.J, at.Lambda)) + delta.diag(), at.h
    for _ in range(30):
        eps = torch.randn(1, len(mu), generator=generator, dtype=torch.float64)[0]
        theta = mu + torch.linalg.solve(torch.linalg.cholesky(P).T, eps)
        h = (f + at.J @ (theta - start))[:, None]
        Lambda = oracle.hessians("categorical", h, y[:, None])[:, 0]
        P = (1 - rho) * P + rho * (keep(oracle.ggn(at.J, Lambda)) + delta.diag())
        r = oracle.residuals("categorical", h, y[:, None])[:, 0]
        mu = mu + rho * torch.linalg.solve(P, torch.einsum("nkp,nk->p", at.J, r) - delta * mu)
    assert_close(refined.mean, mu, rtol=1e-8)
    assert_close(refined.covariance(), torch.linalg.inv(P), rtol=1e-8)
    assert float(torch.linalg.eigvalsh(refined.covariance())[0]) > 0
    assert refined.refinement is not None
    assert refined.refinement.n_steps == 30 and not refined.refinement.converged


@pytest.mark.parametrize("by", ["vi", "vi_diag"])
def test_steps_can_be_counted(by: str):
    posterior, *_ = fitted("classification")
    whole = lw.refine(posterior, by=by).refinement
    reports = [lw.refine(posterior, by=by, max_steps=n).refinement for n in (1, 3, 1000)]
    assert whole is not None and all(report is not None for report in reports)
    assert [report.n_steps for report in reports] == [1, 3, whole.n_steps]
    assert [report.converged for report in reports] == [False, False, True]
    for report in reports:
        assert report.path == whole.path[: 1 + report.n_steps]  # the same steps
    published = lw.refine(posterior, by=by, preset="immer2021", max_steps=7).refinement
    assert published is not None and published.n_steps == 7


def five_classes(**options: object) -> lw.Posterior:
    model, x, _ = problem("classification")
    torch.manual_seed(0)
    head = nn.Linear(2, 5).double()
    y = (head(x) + torch.randn(len(x), 5, dtype=torch.float64)).argmax(1)
    return lw.fit(nn.Sequential(model, nn.Tanh(), head), (x, y), "classification", structure="full", **options)


def test_the_sampled_bound_is_climbed_where_outputs_are_wide():
    """The curvature is the gradient of the sampled bound itself: steps ascend it, whatever its error is."""
    report = lw.refine(five_classes(prior=0.05), by="vi").refinement
    assert report is not None and report.converged
    assert all(b >= a - 1e-6 for a, b in zip(report.path, report.path[1:], strict=False))


def test_many_classes_by_common_random_numbers():
    posterior = five_classes()
    once, other = (lw.refine(posterior, by="vi", generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    assert once.refinement is not None and other.refinement is not None
    assert once.refinement.converged and once.refinement.gradient < 1e-8
    assert_close(other.mean, once.mean, rtol=0.02)
    assert other.refinement.elbo == pytest.approx(once.refinement.elbo, abs=0.02)


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_a_grid_resolves_wide_gaussians(spread: float):
    """Against a fine sum over the real line."""
    m, v = torch.tensor([[-1.0], [2.5]], dtype=torch.float64), torch.full((2, 1, 1), spread**2, dtype=torch.float64)
    y, likelihood = torch.tensor([[1.0], [0.0]], dtype=torch.float64), lw.Bernoulli()
    found = expectation(likelihood, 1, y, generator=torch.Generator())(likelihood, y, m, v)
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    w = torch.softmax(-0.5 * z**2, 0)
    p = torch.sigmoid(m + spread * z)
    assert_close(found.residual[:, 0], y[:, 0] - p @ w, rtol=1e-11)
    assert_close(found.hessian[:, 0, 0], (p * (1 - p)) @ w, rtol=1e-10)


@pytest.mark.parametrize("c", [3, 4])  # by a grid, and by the nodes of every step
def test_a_softmax_needs_one_axis_fewer(c: int):
    torch.manual_seed(c)
    root = 0.7 * torch.randn(2, c, c, dtype=torch.float64)
    m, y, likelihood = torch.randn(2, c, dtype=torch.float64), torch.tensor([0, c - 1]), lw.Categorical()
    rule = expectation(likelihood, c, y, generator=torch.Generator())
    found = rule(likelihood, y, m, root @ root.mT)
    z = sobol_normal(1 << 16, c, generator=torch.Generator().manual_seed(0))
    h = m + torch.einsum("mcd,qd->qmc", root, z)
    truth = likelihood.residual(h, y.expand(len(h), 2)).mean(0)
    assert_close(found.residual, truth, rtol=1e-3 if c == 3 else 1e-2)


@pytest.mark.parametrize("c", [2, 3, 5])
def test_a_softmax_needs_no_labels_at_its_points(c: int):
    """The same sums as label by label, with class weights, a term that is ignored and a class that is ruled out."""
    torch.manual_seed(c)
    root = torch.randn(4, c, c, dtype=torch.float64)
    m, y = torch.randn(4, c, dtype=torch.float64), torch.tensor([0, c - 1, -100, 1])
    m[0, 1] = -torch.inf
    likelihood = lw.Categorical(weight=[2.0, 1.0, 0.5, 1.0, 3.0][:c])
    rule = expectation(likelihood, c, y, generator=torch.Generator().manual_seed(1))
    assert isinstance(rule, SoftmaxOutputs)
    found, cov = rule(likelihood, y, m, root @ root.mT), root @ root.mT
    last = cov[:, -1:, -1:] - cov[:, -1:] - cov[:, :, -1:]  # of the differences from the last output
    R = torch.linalg.cholesky((cov + last)[:, :-1, :-1])
    z, w = rule.nodes(float(R.norm(dim=-2).max()))
    h = m + nn.functional.pad(torch.einsum("mcd,qd->qmc", R, z), (0, 1))
    labels = y.expand(len(h), 4)
    assert_close(found.log_lik, w @ likelihood.log_prob(h, labels).sum(-1), rtol=1e-12)
    r = likelihood.residual(h, labels)
    assert_close(found.residual, torch.einsum("q,qmc->mc", w, r), rtol=1e-12)
    slope = -torch.einsum("q,qmc,qd->mcd", w, r, z)[:, :-1] @ torch.linalg.inv(R)
    values, U = torch.linalg.eigh((slope + slope.mT) / 2)
    assert_close(found.hessian[:, :-1, :-1], U * values.clamp(min=0)[:, None] @ U.mT, rtol=1e-10)
    assert_close(found.hessian.sum(-1), torch.zeros_like(m), rtol=1e-12)


def test_a_diagonal_is_fitted_by_products_where_both_sides_are_large(monkeypatch: pytest.MonkeyPatch):
    posterior, *_ = fitted("classification")
    by_factor = lw.refine(posterior, by="vi_diag")
    monkeypatch.setattr("lapwing.refinement.covariances._MOST_SOLVED", 0)
    by_products = lw.refine(posterior, by="vi_diag")
    assert_close(by_products.mean, by_factor.mean, rtol=1e-6)
    assert_close(by_products.marginal_variance(), by_factor.marginal_variance(), rtol=1e-6)
    with pytest.raises(lw.StructureError, match=r"22 weights or 48 outputs.*vi_diag"):
        lw.refine(posterior, by="vi")


def test_several_terms_per_datum_and_a_layer_alone():
    torch.manual_seed(1)
    model = Sequence().double()
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9, 3))
    for params, covariance, by in (
        ("all", FullCovariance(), "vi"),
        ("last_layer", DiagonalCovariance(), "vi_diag"),
    ):
        posterior = lw.fit(model, (x, y), lw.Categorical(class_axis=1), structure="full", params=params)
        refined, given = lw.refine(posterior, by=by), variational_problem(posterior, covariance)
        iterate = given.iterate(given.model.theta, given.model.hessian(given.model.f))
        for _ in range(15):
            iterate = given.moved(iterate, given.gradient(iterate), 1.0)
        precision = covariance.precision(given.model, iterate.curvature)
        assert_close(refined.mean, iterate.theta, rtol=1e-4)
        assert_close(refined.marginal_variance(), precision.inv_diagonal(), rtol=1e-4)


# --- what a refined posterior does and does not do ------------------------------------------------------------------


@pytest.mark.parametrize("by", ["laplace", "vi", "vi_diag"])
def test_model_and_random_states_are_untouched(by: str):
    posterior, *_ = fitted("classification")
    stir()
    with untouched(posterior.linearised.network.model):
        lw.refine(posterior, by=by)


def test_the_posterior_itself_is_untouched_and_its_data_are_remembered():
    posterior, x, y = fitted("classification")
    before = posterior.mean.clone(), posterior.covariance()
    assert_close(lw.refine(posterior).mean, lw.refine(posterior, (x, y)).mean)
    assert_close(posterior.mean, before[0])
    assert_close(posterior.covariance(), before[1])
    assert posterior.refinement is None


def test_held_out_choices_for_another_mean_are_dropped():
    posterior, x, _ = fitted("classification")
    tuned = replace(posterior, readout=Readout(posterior.mean, temperature=3.0))
    assert_close(lw.refine(tuned).predict(x).probs, lw.refine(posterior).predict(x).probs)


def test_the_evidence_still_has_gradients():
    model, x, y = problem("regression")
    precision = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    refined = lw.refine(lw.fit(model, (x, y), lw.Gaussian(NOISE), prior=precision, structure="full"))
    refined.log_evidence().backward()

    def evidence(value: float) -> Tensor:
        return lw.refine(lw.fit(model, (x, y), lw.Gaussian(NOISE), prior=value, structure="full")).log_evidence()

    slope = (evidence(0.7 + 1e-5) - evidence(0.7 - 1e-5)) / 2e-5
    assert_close(precision.grad, slope, rtol=1e-6)


def test_diagnosis_tells_of_it():
    refined = lw.refine(fitted("classification")[0])
    found = {finding.name: finding for finding in refined.diagnose().findings}
    assert "gradient" in found["refinement"].value and not found["refinement"].concern


def test_a_float32_network_is_refined_to_its_own_accuracy():
    model, x, y = problem("classification")
    posterior = lw.fit(model.float(), (x.float(), y), "classification", structure="kron")
    stored, streamed = lw.refine(posterior), lw.refine(posterior, memory=8)
    assert_close(streamed.mean, stored.mean, rtol=1e-4)
    assert streamed.refinement is not None and streamed.refinement.converged
    assert stored.mean.dtype == torch.float32


def test_other_data_are_refused_before_they_count():
    posterior, x, y = fitted("classification")
    for wrong in ((x[:5], y[:5]), (torch.cat([x, x]), torch.cat([y, y]))):
        for memory in (None, 8):
            with pytest.raises(lw.InputError, match="fitted on 24"):
                lw.refine(posterior, wrong, memory=memory)


def test_newton_on_function_space_with_a_rank_deficient_kernel_and_a_softmax():
    posterior, *_ = fitted("classification", n=24)  # 48 outputs, 22 weights: K has rank 22 at most
    model = linear_model(posterior)
    assert model.n_outputs > model.p
    assert_close(mode_in_functions(model).theta, mode_in_weights(model).theta, rtol=1e-8)
    assert refine_laplace(posterior, source(posterior), 1 << 20).refinement is not None
