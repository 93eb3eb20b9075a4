"""The evidence framework: MacKay's worked networks, its gradients, its fixed points, tempering, held-out grids."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.data import as_batches
from lapwing.predictive.link_rules import DEFAULT, PROBIT
from lapwing.tuning.evidence.variables import _log_scale_bounds
from lapwing.tuning.validation.held_out import HeldOut as HeldOutPass
from lapwing.tuning.validation.held_out import Shift
from lapwing.tuning.validation.scoring import Freedom, HeldOutScore, _best_on
from lapwing.tuning.validation.search import GRID, NETWORK_SCALE, Candidate
from oracle import assert_close

# --- the 1-h-1 networks on a noisy sine ------------------------------------------------------------------------

X_SINE = np.linspace(-1, 1, 41)
CLEAN = np.sin(2 * np.pi * X_SINE)
Y_SINE = CLEAN + 0.1 * np.random.default_rng(0).normal(size=41)


@dataclass(frozen=True)
class OneHidden:
    """f = v · tanh(w x + b) + c in NumPy, parameters in torch's order: w, b, v, c."""

    h: int

    def outputs(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """f (41,) and J (41, 3h + 1)."""
        w, b, v, c = np.split(theta, [self.h, 2 * self.h, 3 * self.h])
        a = np.tanh(np.outer(X_SINE, w) + b)
        g = (1 - a**2) * v
        return a @ v + c[0], np.hstack([g * X_SINE[:, None], g, a, np.ones((len(a), 1))])

    def module(self, theta: np.ndarray) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, self.h), nn.Tanh(), nn.Linear(self.h, 1)).double()
        nn.utils.vector_to_parameters(torch.as_tensor(theta), model.parameters())
        return model

    def train(self, theta: np.ndarray, alpha: float, beta: float, steps: int = 30) -> tuple[np.ndarray, float]:
        """Levenberg–Marquardt on β E_D + α E_W; → parameters and the largest entry of the gradient."""

        def objective(theta: np.ndarray) -> float:
            return 0.5 * beta * ((Y_SINE - self.outputs(theta)[0]) ** 2).sum() + 0.5 * alpha * theta @ theta

        eye, damping, value = np.eye(len(theta)), 1e-3, objective(theta)
        for _ in range(steps):
            f, J = self.outputs(theta)
            gradient = alpha * theta - beta * J.T @ (Y_SINE - f)
            if abs(gradient).max() < 1e-9:
                break
            while damping < 1e12:
                moved = theta - np.linalg.solve(beta * J.T @ J + (alpha + damping) * eye, gradient)
                if objective(moved) <= value:
                    theta, value, damping = moved, objective(moved), max(damping / 10, 1e-12)
                    break
                damping *= 10
        return theta, abs(gradient).max()


def alternate(
    net: OneHidden, theta: np.ndarray, alpha: float = 0.1, beta: float = 1 / Y_SINE.var(), by: str = "evidence"
) -> lw.Posterior:
    """Train at the present α and β, then let Lapwing choose them anew, until nothing moves."""
    data = (torch.as_tensor(X_SINE)[:, None], torch.as_tensor(Y_SINE)[:, None])
    for _ in range(200):
        theta, gradient = net.train(theta, alpha, beta)
        fitted = lw.fit(net.module(theta), data, "regression", prior=alpha, structure="full")
        posterior = lw.tune(fitted, by=by, mode="network")
        before = alpha, beta
        alpha, beta = hyperparameters(posterior)
        if max(abs(log(alpha / before[0])), abs(log(beta / before[1]))) < 1e-5 and gradient < 1e-4:
            return posterior
    raise AssertionError("the alternation did not converge")


def hyperparameters(posterior: lw.Posterior) -> tuple[float, float]:
    return float(posterior.prior.precisions[0]), float(posterior.likelihood.resolved()[0]) ** -2


@cache
def best_of(h: int, restarts: int) -> lw.Posterior:
    starts = [np.random.default_rng(seed).normal(size=3 * h + 1) for seed in range(restarts)]
    return max((alternate(OneHidden(h), start) for start in starts), key=lambda p: float(p.log_evidence()))


def assert_worked(posterior: lw.Posterior, gamma: float, alpha: float, beta: float, log_Z: float) -> None:
    assert float(posterior.effective_dimension()) == pytest.approx(gamma, abs=0.05)
    assert hyperparameters(posterior)[0] == pytest.approx(alpha, rel=0.02)
    assert hyperparameters(posterior)[1] == pytest.approx(beta, rel=0.01)
    assert float(posterior.log_evidence()) == pytest.approx(log_Z, abs=0.05)


def error_to_the_sine(posterior: lw.Posterior) -> float:
    f = posterior.outputs(torch.as_tensor(X_SINE)[:, None]).mean[:, 0].numpy()
    return float(np.sqrt(((f - CLEAN) ** 2).mean()))


def test_three_hidden_units_are_too_few():
    posterior = best_of(3, 4)
    assert_worked(posterior, gamma=9.654, alpha=0.0217, beta=157.0, log_Z=-3.691)
    assert error_to_the_sine(posterior) == pytest.approx(0.0547, abs=0.001)
    assert float(posterior.effective_dimension()) > 0.95 * posterior.layout.p  # every parameter is used up


def test_six_hidden_units():
    posterior = best_of(6, 4)
    assert_worked(posterior, gamma=12.553, alpha=0.1045, beta=176.3, log_Z=-0.504)
    assert error_to_the_sine(posterior) == pytest.approx(0.0488, abs=0.001)
    assert float(posterior.likelihood.resolved()) == pytest.approx(0.0753, rel=0.01)
    assert float(posterior.log_evidence()) > float(best_of(3, 4).log_evidence()) + 3


def test_six_hidden_units_by_fixed_point():
    posterior = alternate(OneHidden(6), np.random.default_rng(0).normal(size=19), by="fixed_point")
    assert_worked(posterior, gamma=12.553, alpha=0.1045, beta=176.3, log_Z=-0.504)


def test_twelve_hidden_units_prune_the_surplus_six():
    """The optimum of six units is one of twelve: from there, with six weak units more, these are switched off.

    It is not the only one: restarts from wide random weights also find an optimum with log Z = 2.18 and γ = 9.83.
    """
    six = best_of(6, 4).mean.numpy()
    extra = 0.05 * np.random.default_rng(1).normal(size=(3, 6))
    start = np.concatenate([np.append(part, e) for part, e in zip(np.split(six[:18], 3), extra, strict=True)])
    posterior = alternate(OneHidden(12), np.append(start, six[18]), *hyperparameters(best_of(6, 4)))
    assert_worked(posterior, gamma=12.553, alpha=0.1045, beta=176.3, log_Z=-0.504)
    assert units_in_use(posterior) == units_in_use(best_of(6, 4)) <= 6


def units_in_use(posterior: lw.Posterior) -> int:
    w, b, v = np.split(posterior.mean.numpy()[:-1], 3)
    return int((abs(w * v) + abs(b * v) > 1e-2).sum())


@pytest.mark.slow
def test_most_restarts_agree_with_six_units():
    runs = [alternate(OneHidden(6), np.random.default_rng(seed).normal(size=19)) for seed in range(8)]
    scores = sorted((float(p.log_evidence()) for p in runs), reverse=True)
    assert scores[:4] == pytest.approx([-0.504] * 4, abs=0.05)


# --- gradients of the evidence ----------------------------------------------------------------------------------


def small_problem(n_outputs: int = 1, n: int = 25) -> tuple[nn.Module, Tensor, Tensor]:
    """A half-trained 2-5-C tanh network: not at a mode, as networks are."""
    g = torch.Generator().manual_seed(n_outputs)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64)
    target = torch.stack([torch.sin((c + 1) * x[:, 0]) + x[:, 1] for c in range(n_outputs)], 1)
    spread = torch.linspace(0.1, 0.6, n_outputs, dtype=torch.float64)
    y = target + spread * torch.randn(n, n_outputs, generator=g, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n_outputs)
        model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, n_outputs)).double()
        optimiser = torch.optim.LBFGS(model.parameters(), max_iter=60)

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = (model(x) - y).square().sum() + 0.01 * sum(p.square().sum() for p in model.parameters())
            loss.backward()
            return loss

        optimiser.step(closure)
    return model, x, y


@cache
def regression(n_outputs: int = 1, per_output: bool = False, groups: str = "one") -> lw.Posterior:
    model, x, y = small_problem(n_outputs)
    likelihood = lw.Gaussian(per_output=per_output)
    return lw.fit(model, (x, y), likelihood, prior=lw.prior(model, 0.8, groups=groups), structure="full")


def evidence_at(posterior: lw.Posterior, log_precisions: Tensor, log_noise: Tensor, log_kappa: Tensor) -> Tensor:
    moved = posterior.with_prior(posterior.prior.with_precisions(log_precisions.exp()))
    likelihood = posterior.likelihood.with_noise_std(log_noise.exp())
    return moved.with_likelihood(likelihood, likelihood_scale=log_kappa.exp()).log_evidence()


def central_differences(function, at: Tensor, h: float = 1e-5) -> Tensor:
    steps = h * torch.eye(at.numel(), dtype=at.dtype)
    return torch.stack([(function(at + step) - function(at - step)) / (2 * h) for step in steps])


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
@pytest.mark.parametrize("groups", ["one", "layer", "tensor", "element"])
@pytest.mark.parametrize("per_output", [False, True])
def test_gradients_of_the_evidence(structure: str, groups: str, per_output: bool):
    model, x, y = small_problem(2)
    prior = lw.prior(model, 0.8, groups=groups)
    posterior = lw.fit(model, (x, y), lw.Gaussian(per_output=per_output), prior=prior, structure=structure)
    start = [
        posterior.prior.precisions.log(),
        posterior.likelihood.resolved().log(),
        torch.tensor([-0.3], dtype=torch.float64),
    ]
    sizes = [len(v) for v in start]

    def evidence(flat: Tensor) -> Tensor:
        log_precisions, log_noise, log_kappa = flat.split(sizes)
        return evidence_at(posterior, log_precisions, log_noise, log_kappa[0])

    flat = torch.cat(start).requires_grad_()
    (gradient,) = torch.autograd.grad(evidence(flat), flat)
    assert_close(gradient, central_differences(evidence, flat.detach()), rtol=1e-7)

    kappa = torch.tensor(-0.3, dtype=torch.float64).exp()
    at = posterior.with_likelihood(posterior.likelihood, likelihood_scale=kappa)
    analytic = (at.effective_dimension() - at.prior.precisions * at.prior.scatter(at.linearised.theta)) / 2
    assert_close(gradient[: sizes[0]], analytic, rtol=1e-10)


def test_gradient_without_noise_is_that_of_a_classifier():
    """One-output labels: only the precisions and the likelihood scale have a gradient."""
    model, x, y = small_problem(1)
    posterior = lw.fit(model, (x, (y > 0).double()), "binary", prior=lw.prior(model, 0.8, groups="layer"))

    def evidence(flat: Tensor) -> Tensor:
        moved = posterior.with_prior(posterior.prior.with_precisions(flat[:-1].exp()))
        return moved.with_likelihood(posterior.likelihood, likelihood_scale=flat[-1].exp()).log_evidence()

    flat = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(evidence(flat), flat)
    assert_close(gradient, central_differences(evidence, flat.detach()), rtol=1e-7)


def gradient_at(posterior: lw.Posterior) -> Tensor:
    """∂ log Z / ∂ (log precisions, log noise) where the posterior stands."""
    start = [posterior.prior.precisions.detach().log(), posterior.likelihood.resolved().detach().log()]
    leaves = [v.clone().requires_grad_() for v in start]
    value = evidence_at(posterior, *leaves, posterior.likelihood_scale.detach().log())
    return torch.cat(torch.autograd.grad(value, leaves))


@pytest.mark.parametrize("groups", ["one", "layer", "tensor"])
@pytest.mark.parametrize("per_output", [False, True])
def test_fixed_point_is_where_the_gradient_vanishes(groups: str, per_output: bool):
    tuned = lw.tune(regression(2, per_output, groups), by="fixed_point", mode="network")
    assert gradient_at(tuned).abs().max() < 1e-7
    again = lw.tune(tuned, by="evidence", mode="network")
    assert_close(again.prior.precisions, tuned.prior.precisions, rtol=1e-6)
    elsewhere = tuned.with_prior(tuned.prior.with_precisions(1.1 * tuned.prior.precisions))
    assert gradient_at(elsewhere).abs().max() > 1e-2


def test_fixed_point_equations_hold_to_eight_digits():
    """α = γ/‖w‖², β = (N C − γ)/Σ(y − f)², and the gradient is zero there."""
    tuned = lw.tune(regression(), by="fixed_point", mode="network")
    alpha, beta = hyperparameters(tuned)
    gamma = float(tuned.effective_dimension())
    model, x, y = small_problem()
    assert alpha == pytest.approx(gamma / float(tuned.mean.square().sum()), rel=1e-8)
    assert beta == pytest.approx((len(y) - gamma) / float((y - model(x)).detach().square().sum()), rel=1e-8)
    assert gradient_at(tuned).abs().max() < 1e-8


@pytest.mark.parametrize("groups", ["one", "layer", "tensor"])
@pytest.mark.parametrize("per_output", [False, True])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_evidence_and_fixed_point_agree(groups: str, per_output: bool, structure: str):
    model, x, y = small_problem(2)
    prior = lw.prior(model, 0.8, groups=groups)
    posterior = lw.fit(model, (x, y), lw.Gaussian(per_output=per_output), prior=prior, structure=structure)
    by_gradient = lw.tune(posterior, by="evidence", mode="network")
    by_updates = lw.tune(posterior, by="fixed_point", mode="network")
    assert_close(by_gradient.prior.precisions.log(), by_updates.prior.precisions.log(), rtol=1e-5)
    assert_close(by_gradient.likelihood.resolved(), by_updates.likelihood.resolved(), rtol=1e-6)
    assert_close(by_gradient.log_evidence(), by_updates.log_evidence(), rtol=1e-9)
    assert by_gradient.history[-1].score == pytest.approx(float(by_gradient.log_evidence()), rel=1e-8)
    assert float(by_gradient.log_evidence()) > float(posterior.log_evidence())


# --- tempering --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("word", ["regression", "classification", "count", "multilabel"])
def test_tempered_precision_is_the_hessian_of_the_tempered_objective(kappa: float, word: str):
    """κ Σ −log p + ½ δ ‖θ‖² of a linear model, differentiated twice by brute force."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(9, 3, generator=g, dtype=torch.float64)
    model = nn.Linear(3, 3).double()
    nn.utils.vector_to_parameters(0.5 * torch.randn(12, generator=g, dtype=torch.float64), model.parameters())
    kinds = {"regression": "gaussian", "classification": "categorical", "count": "poisson", "multilabel": "bernoulli"}
    y = {
        "regression": torch.randn(9, 3, generator=g, dtype=torch.float64),
        "classification": torch.randint(3, (9,), generator=g),
        "count": torch.randint(5, (9, 3), generator=g).double(),
        "multilabel": torch.randint(2, (9, 3), generator=g).double(),
    }[word]
    kind, options = kinds[word], {"noise_std": 0.6} if word == "regression" else {}
    likelihood = lw.Gaussian(noise_std=0.6) if word == "regression" else word
    delta = 0.9
    posterior = lw.fit(model, (x, y), likelihood, prior=delta, likelihood_scale=kappa, structure="full")

    def objective(theta: Tensor) -> Tensor:
        f = x @ theta[:9].reshape(3, 3).T + theta[9:]
        targets = oracle.target_sites(kind, y, oracle.site_index((3,)))
        log_lik = oracle.log_lik(kind, f[:, None], targets, **options)
        return -kappa * log_lik + 0.5 * delta * theta @ theta

    hessian = torch.autograd.functional.hessian(objective, posterior.mean)
    assert_close(posterior.precision.to_dense(), hessian)
    gradient = torch.autograd.functional.jacobian(objective, posterior.mean)
    from_fit = delta * posterior.mean - posterior.part_scales @ posterior.estimate.statistics.gradients
    assert_close(from_fit, gradient)
    assert_close(posterior.log_lik(), 0.5 * delta * posterior.mean.square().sum() - objective(posterior.mean))


def test_tempering_survives_tuning_of_the_noise():
    """With κ the evidence is that of κ n targets: gradient and fixed point still agree."""
    model, x, y = small_problem(n=60)
    posterior = lw.fit(model, (x, y), "regression", likelihood_scale=0.5, structure="full")
    by_gradient = lw.tune(posterior, by="evidence", mode="network")
    by_updates = lw.tune(posterior, by="fixed_point", mode="network")
    assert_close(by_gradient.prior.precisions, by_updates.prior.precisions, rtol=1e-6)
    assert_close(by_gradient.likelihood.resolved(), by_updates.likelihood.resolved(), rtol=1e-7)
    assert gradient_at(by_gradient).abs().max() < 1e-6
    assert float(by_gradient.likelihood_scale) == 0.5


# --- against brute force ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["one", "layer"])
def test_noise_per_output_against_brute_force(groups: str):
    """SciPy maximises the oracle's evidence over every precision and noise level from scratch."""
    posterior = regression(2, True, groups)
    model, x, y = small_problem(2)
    f, J = oracle.jacobian(model, x)
    theta, index = oracle.theta(model), posterior.prior.index

    def negative(logs: np.ndarray) -> float:
        values = torch.as_tensor(logs).exp()
        precisions, noise = values[: len(posterior.prior.precisions)], values[len(posterior.prior.precisions) :]
        H = oracle.ggn(J, torch.diag(noise**-2).expand(len(x), 2, 2))
        log_lik = oracle.log_lik("gaussian", f[:, None], y[:, None], noise_std=noise)
        return -float(oracle.log_evidence(log_lik, H, precisions[index], theta))

    start = np.zeros(len(posterior.prior.precisions) + 2)
    best = minimize(negative, start, method="BFGS", options={"gtol": 1e-6})
    tuned = lw.tune(posterior, by="evidence", mode="network")
    found = torch.cat([tuned.prior.precisions, tuned.likelihood.resolved()]).log()
    assert found.tolist() == pytest.approx(best.x.tolist(), abs=1e-4)
    assert float(tuned.log_evidence()) == pytest.approx(-best.fun, abs=1e-8)


@dataclass(frozen=True)
class HeldOut:
    """A fit, held-out data, and the held-out NLL computed with the oracle alone."""

    kind: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, kind: str) -> HeldOut:
        model, x, y = small_problem(n=40)
        if kind == "bernoulli":  # an overconfident network: one label in five is flipped
            y = ((y > 0) ^ (torch.arange(len(y)) % 5 == 0)[:, None]).double()
            model[2].weight.data *= 4
        return cls(kind, model, (x[:25], y[:25]), (x[25:], y[25:]))

    @cached_property
    def jacobians(self) -> tuple[Tensor, ...]:
        """f and J at the training inputs, then at the held-out ones."""
        return (*oracle.jacobian(self.model, self.train[0]), *oracle.jacobian(self.model, self.validation[0]))

    def gaussian(self, precision: float, noise_std: float = 1.0) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs at the held-out inputs."""
        f, J, m, J_new = self.jacobians
        options = {"noise_std": noise_std} if self.kind == "gaussian" else {}
        H = oracle.ggn(J, oracle.hessians(self.kind, f[:, None], self.train[1][:, None], **options)[:, 0])
        return m[:, 0], oracle.functional_cov(J_new, oracle.posterior(H, precision))[:, 0, 0]

    def nll(self, precision: float, noise_std: float = 1.0) -> float:
        m, v = self.gaussian(precision, noise_std)
        y = self.validation[1][:, 0]
        if self.kind == "gaussian":
            return -float(torch.distributions.Normal(m, (v + noise_std**2).sqrt()).log_prob(y).mean())
        return sigmoid_nll(m, v, y)


def validated(posterior: lw.Posterior, held_out: HeldOut) -> lw.Posterior:
    return lw.tune(posterior, by="validation", validation=held_out.validation, mode="network", progress=False)


def test_validation_of_labels_scores_what_a_user_would_measure():
    """Scale and temperature together: no pair on a grid of the oracle's does better."""
    case = HeldOut.of("bernoulli")
    tuned = validated(lw.fit(case.model, case.train, "binary", prior=1.0, structure="full"), case)
    taken = tuned.history[-1]
    measured = tuned.predict(case.validation[0]).log_prob(case.validation[1]).mean()
    assert "taken" in taken.note and float(measured) == pytest.approx(taken.score, abs=1e-6)
    best = max(step.score for step in tuned.history)
    assert (best - taken.score) * len(case.validation[1]) < 4  # nats: a weak prior may overrule a lucky candidate
    for precision in GRID[::2].tolist():
        for T in (0.5, 1.0, 2.0, 4.0):
            m, v = case.gaussian(precision)
            assert sigmoid_nll(m / T, v / T**2, case.validation[1][:, 0]) > -best - 1e-3


def test_held_out_data_keep_the_relative_precisions_that_the_evidence_found():
    """Groups that were found in the network start anew for the evidence, not for held-out data."""
    case = HeldOut.of("bernoulli")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    posterior = lw.fit(model, case.train, "binary", structure="full")
    alone = lw.tune(posterior)
    assert any(alone.prior.reasons) and len(alone.prior.precisions) > 1
    after, at_once = validated(alone, case), lw.tune(posterior, validation=case.validation, budget="exact")
    assert torch.equal(after.prior.precisions, at_once.prior.precisions)
    assert after.history[-1].score == at_once.history[-1].score


def test_validation_is_never_worse_than_the_network_or_its_best_temperature():
    case = HeldOut.of("bernoulli")
    tuned = validated(lw.fit(case.model, case.train, "binary", prior=1.0, structure="full"), case)
    f, y = case.jacobians[2], case.validation[1]
    scaled = [nn.functional.binary_cross_entropy_with_logits(f / T, y) for T in torch.logspace(-0.9, 0.9, 181)]
    measured = -float(tuned.predict(case.validation[0]).log_prob(y).mean())
    assert measured <= float(nn.functional.binary_cross_entropy_with_logits(f, y)) + 1e-9
    assert measured <= float(min(scaled)) + 1e-4


def test_labels_that_are_all_right_do_not_make_a_network_much_surer():
    """The NLL falls with T to its end; under the prior on log T it does so a little."""
    case = HeldOut.of("bernoulli")
    model = deepcopy(case.model)
    model[2].weight.data /= 4
    x = case.validation[0]
    right = replace(case, model=model, validation=(x, (model(x) > 0).double()))
    tuned = validated(lw.fit(model, case.train, "binary", prior=1.0, structure="full"), right)
    assert 0.5 < tuned.readout.temperature <= 1
    f, y = model(x).detach(), right.validation[1]
    sharp, plain = (float(nn.functional.binary_cross_entropy_with_logits(f / T, y)) for T in (0.2, 1.0))
    measured = -float(tuned.predict(x).log_prob(y).mean())
    assert sharp < measured <= plain


def test_validation_with_known_noise_is_brute_force():
    case = HeldOut.of("gaussian")
    tuned = validated(lw.fit(case.model, case.train, lw.Gaussian(noise_std=0.07), prior=1.0, structure="full"), case)
    scales = [*GRID.tolist(), NETWORK_SCALE]
    scores = [case.nll(scale, 0.07) for scale in scales]
    tried = tuned.history[:-1]
    assert [step.scale for step in tried] == pytest.approx(scales)
    at_network = [step for step in tried if "network mean" in step.note]
    assert [-s.score for s in at_network] == pytest.approx(
        [x for x, s in zip(scores, tried, strict=True) if s in at_network]
    )
    assert all(-step.score <= score + 1e-8 for step, score in zip(tried, scores, strict=True))
    assert float(tuned.likelihood.resolved()) == 0.07


def test_a_temperature_pays_for_itself_once_for_all_terms():
    """(log T − 1)² + (log T / ½)² / 2n is least at log T = 1 / (1 + 2/n), which a parabola finds."""
    for n in (10, 1000):
        grid = torch.linspace(-1.8, 2.4, 8, dtype=torch.float64)
        found = _best_on(grid, lambda T: (T.log() - 1) ** 2, PROBIT, Freedom(0.0, 0.5, 0.5), n)
        assert log(found.dispersion) == pytest.approx(1 / (1 + 2 / n), rel=1e-9)
        assert found.cost == pytest.approx(2 / (1 + 2 / n) ** 2, rel=1e-9)


def test_what_a_candidate_pays_for():
    """Nothing for the network read as usual; else for its mean, temperature, link and scale."""
    plain = Candidate(0, 1.0, "network", HeldOutScore(0.3, 1.0, DEFAULT))
    other = Candidate(0, 100.0, "linear", HeldOutScore(0.3, 1.5, PROBIT, cost=0.7))
    assert plain.cost == 0
    assert other.cost == pytest.approx(2.0 + 0.7 + 0.5 + 0.5)


def test_bounds_of_the_noise_are_those_of_the_curvatures_scale():
    """c = κ/σ², so that the largest noise is the smallest scale."""
    case = HeldOut.of("gaussian")
    posterior = lw.fit(case.model, case.train, "regression", likelihood_scale=0.5, structure="diag")
    low, high = posterior.noise_bounds()
    least, most = _log_scale_bounds(posterior)
    assert_close((0.5 / torch.cat([most, least]).exp()).sqrt(), torch.cat([low, high]))


def test_means_that_are_tried_move_along_the_jacobian():
    """f + length · J (θ − θ*), the move of the scale at hand."""
    case = HeldOut.of("gaussian")
    posterior = lw.fit(case.model, case.train, lw.Gaussian(noise_std=0.07), prior=1.0, structure="full")
    moves = torch.randn(2, posterior.layout.p, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ways = [Shift({"half": 0.5, "step": 1.0}, moves)]
    precisions = [posterior.with_prior(s).precision for s in (1.0, 3.0)]
    held_out = HeldOutPass.of(posterior, as_batches(case.validation), precisions, ways, 10_000, None)
    _, _, f, J = case.jacobians
    for i, move in enumerate(moves):
        for name, length in (("network", 0.0), ("half", 0.5), ("step", 1.0)):
            assert_close(held_out.gaussian(name, i).mean[:, 0], f + length * J @ move)


@pytest.mark.parametrize("kappa", [1.0, 0.5])
def test_validation_chooses_the_noise_in_closed_form(kappa: float):
    """At every fourth grid point τ = δσ²/κ, with a prior of standard deviation ¼ on the log of the factor a of both
    variances: the minimiser that a line search finds, or quarters of its log where the gain is not sure."""
    case = HeldOut.of("gaussian")
    fitted = lw.fit(case.model, case.train, "regression", prior=1.0, likelihood_scale=kappa, structure="full")
    tuned = validated(fitted, case)
    tau0 = float(fitted.likelihood.resolved()) ** 2 / kappa
    log_noise = float(np.log(float(fitted.likelihood.resolved())))
    for step in tuned.history[:-1:4]:
        if "network mean" not in step.note:
            continue

        def nll(log_std: float, tau: float = step.scale * tau0) -> float:
            std = float(np.exp(log_std))
            # κ H₁/σ² + δ = (κ/σ²)(H₁ + τ): the same covariance as noise std σ/√κ in an untempered fit
            m, v = case.gaussian(tau * kappa / std**2, std / kappa**0.5)
            return -float(torch.distributions.Normal(m, (v + std**2).sqrt()).log_prob(case.validation[1][:, 0]).mean())

        def penalised(log_a: float, n: int = len(case.validation[0])) -> float:
            return n * nll(log_noise + 0.5 * log_a) + Freedom(0.25, 1, 1).cost_of_factor(log_a)

        best = minimize_scalar(penalised, bounds=(-5, 5), method="bounded", options={"xatol": 1e-10})
        log_a = 2 * (float(np.log(step.noise_std[0])) - log_noise)
        quarters = 4 * log_a / best.x
        assert quarters == pytest.approx(round(quarters), abs=1e-3) and 0 <= round(quarters) <= 4
        assert -step.score == pytest.approx(nll(log_noise + 0.5 * log_a), abs=1e-6)
        assert step.precisions[0] == pytest.approx(step.scale * tau0 * kappa / step.noise_std[0] ** 2, rel=1e-9)
    taken = tuned.history[-1]
    assert float(tuned.prior.precisions) == pytest.approx(taken.precisions[0])
    held_out = tuned.predict(case.validation[0]).log_prob(case.validation[1]).mean()
    assert float(held_out) == pytest.approx(taken.score, abs=1e-6)  # the score is what a user would measure


def sigmoid_nll(m: Tensor, v: Tensor, y: Tensor) -> float:
    z = torch.linspace(-9, 9, 40_001, dtype=torch.float64)
    p = torch.sigmoid(m[:, None] + v.sqrt()[:, None] * z) @ torch.softmax(-0.5 * z**2, 0)
    return -float(torch.distributions.Bernoulli(probs=p).log_prob(y).mean())


def test_covariances_of_held_out_data_are_bounded(monkeypatch):
    """No more inputs carry a covariance for every scale than there is room for."""
    from lapwing.tuning.validation import held_out

    case = HeldOut.of("bernoulli")
    posterior = lw.fit(case.model, case.train, "binary", structure="full")
    monkeypatch.setattr(held_out, "_MOST_COVARIANCES", 10)
    found = HeldOutPass.of(posterior, as_batches(case.validation), [posterior.precision], [], 10_000, None)
    assert len(found.f) == 10
