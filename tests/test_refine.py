"""Refinement: the linear model's mode in every structure, and Gaussian variational posteriors of the linear model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.observations import observed
from lapwing.posterior import Readout
from lapwing.refinement import Passes
from lapwing.refinement.laplace import refine_laplace
from lapwing.refinement.model import LinearModel, gathered
from lapwing.refinement.newton import mode_in_functions, mode_in_weights
from oracle import assert_close
from test_linear_mode import KINDS, STRUCTURES, problem
from untouched import stir, untouched

NOISE = 0.3


def fitted(kind: str, structure: str = "full", n: int = 24, **options: object) -> tuple[lw.Posterior, Tensor, Tensor]:
    model, x, y = problem(kind, n=n)
    likelihood = lw.Gaussian(noise_std=NOISE) if kind == "regression" else kind
    prior = lw.prior(model, [0.4, 2.0], groups="layer")
    return lw.fit(model, (x, y), likelihood, prior=prior, structure=structure, **options), x, y


def logistic(alpha: float = 1.0) -> tuple[lw.Posterior, Tensor, Tensor]:
    """Seven points of a logistic regression on (w, b) whose posterior is known to many digits."""
    x = torch.tensor([-2, -1, -0.5, 0.5, 1, 2, 3], dtype=torch.float64)[:, None]
    y = torch.tensor([0, 0, 1, 0, 1, 1, 1], dtype=torch.float64)
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.fill_(-0.4)
    return lw.fit(model, (x, y), "binary", prior=alpha, structure="full"), x, y


def source(posterior: lw.Posterior) -> Passes:
    assert posterior.source is not None
    return Passes(lambda: observed(posterior.source, posterior.likelihood, posterior.sites, progress=False))


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
    model = linear_model(fitted(kind, n=n)[0])
    primal, dual = mode_in_weights(model), mode_in_functions(model)
    assert primal.converged and dual.converged
    assert_close(dual.theta, primal.theta, rtol=1e-8)
    assert_close(dual.path[-1], primal.path[-1], rtol=1e-10)
    for mode in (primal, dual):
        assert all(b >= a - 1e-10 for a, b in zip(mode.path, mode.path[1:], strict=False))


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


@cache
def published() -> lw.Posterior:
    stir()
    posterior = fitted("classification")[0]
    with untouched(posterior.linearised.network.model):
        return lw.refine(posterior, preset="immer2021")


def test_the_published_laplace_is_a_thousand_steps_of_adam():
    posterior, x, y = fitted("classification")
    refined = published()
    assert refined.refinement is not None
    assert refined.refinement.n_steps == 1000 and not refined.refinement.converged
    f, J = oracle.jacobian(posterior.linearised.network.model, x)
    start = oracle.theta(posterior.linearised.network.model)
    theta = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([theta], lr=1e-3)
    for _ in range(1000):
        optimiser.zero_grad()
        log_lik = oracle.log_lik("categorical", (f + J @ (theta - start))[:, None], y[:, None])
        (0.5 * (posterior.prior.P0.diagonal * theta**2).sum() - log_lik).backward()
        optimiser.step()
    assert_close(refined.mean, theta, rtol=1e-8)


# --- what a refined posterior does and does not do ------------------------------------------------------------------


@pytest.mark.parametrize("by", ["laplace"])
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
    early = published().diagnose()
    assert any(finding.name == "refinement" and "before it converged" in finding.advice for finding in early.concerns)


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
