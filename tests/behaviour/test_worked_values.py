"""Numbers worked out by hand or by dense quadrature, reached the way a user would: fit, evidence, predict.

One-dimensional integrals, Bayesian logistic regression, the step function and the linear-Gaussian identities.
"""

from __future__ import annotations

from math import lgamma, log, pi

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from torch import Tensor, nn

import lapwing as lw
import oracle
from oracle import assert_close


class Scalar(nn.Module):
    """f = slope · w + offset, the same for every input: a density of one unknown written as a network."""

    def __init__(self, w: float, slope: float = 1.0, offset: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))
        self.slope, self.offset = slope, offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.slope * self.w + self.offset).expand(len(x), 1)


ONE = torch.ones(1, 1, dtype=torch.float64)


def integral(posterior: lw.Posterior) -> float:
    """log ∫ lik(w) exp(−½ δ w²) dw by Laplace: the evidence without the prior's normalising constant."""
    return float(posterior.log_evidence()) + 0.5 * log(2 * pi / float(posterior.prior.precisions[0]))


# --- one dimension ------------------------------------------------------------------------------------------


def test_skewed_density_exp_times_sigmoid():
    """exp(−w²/2) σ(20 w + 4): a standard-normal prior and one label."""
    mode = newton(lambda w: -w + 20 * expit(-20 * w - 4), lambda w: -1 - 400 * expit(20 * w + 4) * expit(-20 * w - 4))
    assert mode == pytest.approx(0.0774795810, abs=1e-9)
    posterior = lw.fit(Scalar(mode, 20.0, 4.0), (ONE, ONE), "binary", prior=1.0)
    assert float(posterior.precision.to_dense()) == pytest.approx(2.5435885342, abs=1e-9)
    assert float(posterior.covariance()) == pytest.approx(0.3931453, abs=1e-7)
    assert integral(posterior) == pytest.approx(0.4452675418, abs=1e-9)

    def density(w: float) -> float:
        return np.exp(-(w**2) / 2) * expit(20 * w + 4)

    Z = quad(density, -12, 12, points=[-0.2], epsabs=1e-13)[0]
    mean = quad(lambda w: w * density(w) / Z, -12, 12, points=[-0.2], epsabs=1e-13)[0]
    assert log(Z) == pytest.approx(0.3723834737, abs=1e-9)
    assert mean == pytest.approx(0.6728003, abs=1e-6)  # far from the mode: what Laplace cannot see


def newton(gradient, curvature, at: float = 0.0) -> float:
    for _ in range(50):
        at -= gradient(at) / curvature(at)
    return at


@pytest.mark.parametrize(
    ("k", "exact", "in_log", "in_w"),
    [(1, 0.0, -0.0810615, None), (5, 3.1780538, 3.1614091, 3.1572632), (20, 39.3398842, 39.3357179, 39.3354986)],
)
def test_gamma_integral_depends_on_the_coordinate(k: int, exact: float, in_log: float, in_w: float | None):
    """Γ(k) in u = log w is a Poisson likelihood under an (almost) flat prior; in w itself, a custom one."""
    flat = 1e-13
    y = torch.full((1, 1), float(k), dtype=torch.float64)
    in_u = lw.fit(Scalar(log(k)), (ONE, y), "count", prior=flat)
    assert float(in_u.precision.to_dense()) == pytest.approx(k, rel=1e-12)
    assert integral(in_u) + lgamma(k + 1) == pytest.approx(in_log, abs=1e-6)
    assert lgamma(k) == pytest.approx(exact, abs=1e-6)
    if in_w is None:
        return

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        return (y - 1) * f[0].log() - f[0]

    direct = lw.fit(Scalar(k - 1.0), (ONE, y[:, 0]), lw.CustomLikelihood(log_prob), prior=flat)
    assert integral(direct) == pytest.approx(in_w, abs=1e-6)


def test_gaussian_target_is_exact():
    """A Gaussian integrand times a Gaussian prior: Laplace is the integral."""
    a, centre, delta = 2.3, 0.7, 1.9
    mode = a * centre / (a + delta)
    likelihood = lw.CustomLikelihood(lambda f, y: -0.5 * a * (f[0] - y) ** 2)
    posterior = lw.fit(Scalar(mode), (ONE, torch.full((1,), centre, dtype=torch.float64)), likelihood, prior=delta)
    exact = 0.5 * log(2 * pi / (a + delta)) - 0.5 * a * delta / (a + delta) * centre**2
    assert integral(posterior) == pytest.approx(exact, abs=1e-12)


# --- Bayesian logistic regression -------------------------------------------------------------------------------

X_LOGISTIC = torch.tensor([-2, -1, -0.5, 0.5, 1, 2, 3], dtype=torch.float64)[:, None]
Y_LOGISTIC = torch.tensor([0, 0, 1, 0, 1, 1, 1], dtype=torch.float64)[:, None]
FAR = torch.tensor([[1.5], [-6.0]], dtype=torch.float64)

LOGISTIC = {
    1.0: {
        "map": [0.84153639, 0.03323085],
        "precision": [3.19830965, 0.18092847, 2.23033330],
        "log_lik": -2.98391403,
        "evidence": -4.31864485,
        "exact_evidence": -4.27506370,
        "covariance": [0.31410661, -0.02548087, 0.45043053],
        "quadrature": [0.744473, 0.099588],
        "probit": [0.747535, 0.109673],
        "plugin": [0.785083, 0.006587],
    },
    0.1: {
        "map": [1.28108262, 0.02006048],
        "precision": [1.26646942, 0.05059777, 1.04535878],
        "log_lik": -2.78746351,
        "evidence": -5.31145615,
        "exact_evidence": -5.13612047,
        "covariance": [0.79112649, -0.03829234, 0.95846281],
        "quadrature": [0.794579, 0.091503],
        "probit": [0.796198, 0.104539],
        "plugin": [0.874537, 0.000468],
    },
}


def logistic_regression(x: Tensor, y: Tensor, alpha: float) -> lw.Posterior:
    """A linear layer at its mode, found by Newton's method, and its posterior."""
    model = nn.Linear(x.shape[1], 1).double()
    features = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    theta = torch.zeros(features.shape[1], dtype=x.dtype)
    for _ in range(60):
        p = torch.sigmoid(features @ theta)
        gradient = features.T @ (y[:, 0] - p) - alpha * theta
        A = features.T @ ((p * (1 - p))[:, None] * features) + alpha * torch.eye(len(theta), dtype=x.dtype)
        theta = theta + torch.linalg.solve(A, gradient)
    nn.utils.vector_to_parameters(theta, model.parameters())
    return lw.fit(model, (x, y), "binary", prior=alpha, structure="full")


def upper(A: Tensor) -> list[float]:
    return [float(A[0, 0]), float(A[0, 1]), float(A[1, 1])]


@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_logistic_regression(alpha: float):
    worked = LOGISTIC[alpha]
    posterior = logistic_regression(X_LOGISTIC, Y_LOGISTIC, alpha)
    assert posterior.mean.tolist() == pytest.approx(worked["map"], abs=1e-8)
    assert upper(posterior.precision.to_dense()) == pytest.approx(worked["precision"], abs=1e-7)
    assert upper(posterior.covariance()) == pytest.approx(worked["covariance"], abs=1e-7)
    assert float(posterior.log_lik()) == pytest.approx(worked["log_lik"], abs=1e-7)
    assert float(posterior.log_evidence()) == pytest.approx(worked["evidence"], abs=1e-7)
    for link in ("quadrature", None):
        assert posterior.predict(FAR, link=link).probs[:, 0].tolist() == pytest.approx(worked["quadrature"], abs=1e-6)
    assert posterior.predict(FAR, link="probit").probs[:, 0].tolist() == pytest.approx(worked["probit"], abs=1e-6)
    assert torch.sigmoid(posterior.outputs(FAR).mean)[:, 0].tolist() == pytest.approx(worked["plugin"], abs=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_logistic_regression_evidence_lies_below_the_exact_one(alpha: float):
    """The exact value by a 160 × 160 Gauss–Hermite rule over the prior; Laplace misses the tails."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(160)
    w, b = np.meshgrid(nodes / alpha**0.5, nodes / alpha**0.5)
    f = X_LOGISTIC.numpy()[:, 0, None, None] * w + b
    signs = 2 * Y_LOGISTIC.numpy()[:, 0, None, None] - 1
    exact = log((np.outer(weights, weights) / (2 * pi) * np.prod(expit(signs * f), axis=0)).sum())
    assert exact == pytest.approx(LOGISTIC[alpha]["exact_evidence"], abs=1e-6)
    assert float(logistic_regression(X_LOGISTIC, Y_LOGISTIC, alpha).log_evidence()) < exact


def test_logistic_regression_symmetric_data():
    x = torch.tensor([-2, -1, -0.5, 0.5, 1, 2], dtype=torch.float64)[:, None]
    y = torch.tensor([0, 0, 1, 0, 1, 1], dtype=torch.float64)[:, None]
    posterior = logistic_regression(x, y, 1.0)
    assert posterior.mean.tolist() == pytest.approx([0.76046314, 0.0], abs=1e-8)
    assert upper(posterior.precision.to_dense()) == pytest.approx([2.73207855, 0.0, 2.21083869], abs=1e-7)
    assert float(posterior.log_evidence()) == pytest.approx(-4.15313254, abs=1e-7)


def test_separable_clusters_are_doubted_far_from_the_data():
    """Orthogonal to the direction of the data the plug-in stays as sure as ever; the posterior does not."""
    g = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(40, 2, generator=g, dtype=torch.float64)
    side = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    x = noise + torch.cat([side.expand(20, 2), -side.expand(20, 2)])
    y = (torch.arange(40) < 20).double()[:, None]
    posterior = logistic_regression(x, y, 1.0)
    far = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5 * 20
    across = torch.stack([far[1], -far[1]]) + side  # 20 along the boundary, as deep in the class as the cluster
    p = posterior.predict(across).probs
    plugin = torch.sigmoid(posterior.outputs(across).mean)
    assert bool(((p - 0.5).abs() < 0.5 * (plugin - 0.5).abs()).all())
    near = posterior.predict(side).probs
    assert bool((near > p).all())


# --- the step function: f = 5 tanh(w x + b) -------------------------------------------------------------------------


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 5 * torch.tanh(self.w * x + self.b)


X_STEP = torch.tensor([-2, -1.5, -1, 1, 1.5, 2], dtype=torch.float64)[:, None]
Y_STEP = (X_STEP > 0).double()
AT = torch.tensor([0.5, 1, 2, 4], dtype=torch.float64)[:, None]

STEP = {  # prior variance: mode, precisions, evidence, P(w < 0), then GLM and sampled-network p at (a part of) AT
    1.0: (0.633059, [3.019755, 2.564434], -1.418702, 0.135645, [0.665768, 0.794611, 0.953675, 0.992562]),
    4.0: (0.871582, [0.729885, 0.659727], -1.219249, 0.22825, [None, None, 0.975384, 0.993217]),
}
STEP_SAMPLED = {1.0: [0.654421, 0.747587, 0.817887, 0.847504], 4.0: [None, None, 0.739269, 0.759929]}


def step_posterior(variance: float) -> lw.Posterior:
    """Newton on the MAP objective; by the symmetry of the data b stays zero."""
    model = Step()
    x, y = X_STEP, Y_STEP
    for _ in range(100):
        loss = -torch.nn.functional.logsigmoid((2 * y - 1) * model(x)).sum() + model.w.square().sum() / (2 * variance)
        (slope,) = torch.autograd.grad(loss, model.w, create_graph=True)
        (bend,) = torch.autograd.grad(slope, model.w)
        with torch.no_grad():
            model.w -= (slope / bend.abs()).clamp(-0.2, 0.2)
    return lw.fit(model, (x, y), "binary", prior=1 / variance, structure="full")


def known(values: list[float | None]) -> tuple[list[int], list[float]]:
    return [i for i, v in enumerate(values) if v is not None], [v for v in values if v is not None]


@pytest.mark.parametrize("variance", [1.0, 4.0])
def test_step_posterior_and_linearised_prediction(variance: float):
    mode, precisions, evidence, negative, glm = STEP[variance]
    posterior = step_posterior(variance)
    assert posterior.mean.tolist() == pytest.approx([mode, 0.0], abs=1e-6)
    assert upper(posterior.precision.to_dense()) == pytest.approx([precisions[0], 0.0, precisions[1]], abs=1e-6)
    assert float(posterior.log_evidence()) == pytest.approx(evidence, abs=1e-6)
    z = -posterior.mean[0] / posterior.marginal_variance()[0].sqrt()
    assert float(torch.special.ndtr(z)) == pytest.approx(negative, abs=1e-5)
    rows, values = known(glm)
    assert posterior.predict(AT).probs[rows, 0].tolist() == pytest.approx(values, abs=1e-5)
    assert float(posterior.predict(torch.zeros(1, 1)).probs) == pytest.approx(0.5, abs=1e-12)


def sampled_by_quadrature(posterior: lw.Posterior, x: Tensor, n: int = 100) -> Tensor:
    """E[σ(5 tanh(w x + b))] over the posterior's own Gaussian, by an n × n Gauss–Hermite rule."""
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(n))
    w, b = (m + v.sqrt() * nodes for m, v in zip(posterior.mean, posterior.marginal_variance(), strict=True))
    p = torch.sigmoid(5 * torch.tanh(w[:, None] * x[:, :, None] + b))
    return torch.einsum("i,j,nij->n", weights, weights, p) / (2 * pi)


@pytest.mark.parametrize("variance", [1.0, 4.0])
def test_step_sampled_network_saturates_below_the_linearised_one(variance: float):
    posterior = step_posterior(variance)
    rows, values = known(STEP_SAMPLED[variance])
    exact = sampled_by_quadrature(posterior, AT)
    assert exact[rows].tolist() == pytest.approx(values, abs=1e-5)
    p = posterior.predict(AT, predictive="bnn", n_samples=1000).probs[:, 0]
    assert (p - exact).abs().max() < 4 * 0.5 / 1000**0.5
    glm = posterior.predict(AT).probs[:, 0]
    assert bool((p[2:] < glm[2:] - 0.1).all())
    # It cannot rise above the probability that the slope has the right sign: draws with w < 0 predict the mirror image.
    far = torch.full((1, 1), 50.0, dtype=torch.float64)
    right_sign = 1 - STEP[variance][3]
    assert float(sampled_by_quadrature(posterior, far)) < right_sign + 0.01
    assert float(posterior.predict(far).probs) > 0.99


@pytest.mark.statistical
def test_step_sampled_network_to_sampling_error(generator: torch.Generator):
    """8,000 draws agree with quadrature; draws pushed through the linearisation instead would be caught."""
    posterior = step_posterior(1.0)
    exact = torch.tensor(STEP_SAMPLED[1.0], dtype=torch.float64)
    n = 8_000
    spread = posterior.predict(AT, predictive="bnn", n_samples=n, generator=generator)
    error = 4 * (spread.class_variance.epistemic[:, 0] / n).sqrt()
    assert bool(((spread.probs[:, 0] - exact).abs() < error).all())
    linear = torch.sigmoid(posterior.functions(n, generator)(AT)[..., 0]).mean(0)
    assert not bool(((linear - exact).abs() < error).all())


# --- linear-Gaussian identities ---------------------------------------------------------------------------------------


class LinearInParameters(nn.Module):
    """f = offset + Φ θ for features Φ (B, C, P) and offsets (B, C) given with the data."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta.clone())

    def forward(self, features: Tensor, offset: Tensor) -> Tensor:
        return offset + features @ self.theta


class Identities:
    """A random 3-4-3 tanh network at 7 points: its features, its offsets and some targets."""

    noise_var, delta = 0.3, 0.7

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        self.x = torch.randn(7, 3, generator=g, dtype=torch.float64)
        self.y = torch.randn(7, 3, generator=g, dtype=torch.float64)
        self.x_new = torch.randn(5, 3, generator=g, dtype=torch.float64)
        self.f, self.J = oracle.jacobian(self.model, self.x)
        self.theta = oracle.theta(self.model)
        self.offset = self.f - self.J @ self.theta
        self.likelihood = lw.Gaussian(noise_std=self.noise_var**0.5)
        self.blr = oracle.conjugate_regression(self.J, self.y, self.offset, self.noise_var**0.5, self.delta)

    def fit(self) -> lw.Posterior:
        return lw.fit(self.model, (self.x, self.y), self.likelihood, prior=self.delta, structure="full")


def test_newton_step_from_the_network_is_the_regression_on_its_jacobian():
    """μ = A⁻¹ (Jᵀ r + H θ*) from the fit's own statistics; covariance and predictions with it."""
    case = Identities()
    posterior = case.fit()
    mean, cov, _ = case.blr
    gradient = posterior.part_scales @ posterior.estimate.statistics.gradients
    moved = posterior.precision.solve(gradient + posterior.curvature.mv(posterior.mean))
    assert_close(moved, mean)
    assert_close(posterior.covariance(), cov)
    assert_close(
        posterior.outputs(case.x_new).cov, oracle.functional_cov(oracle.jacobian(case.model, case.x_new)[1], cov)
    )


def test_evidence_at_the_linear_mode_is_the_density_of_the_targets():
    """A model that is linear in its parameters, at its ridge solution: log Z = log N(y; offset, J Jᵀ/δ + σ² I)."""
    case = Identities()
    mean, cov, log_p = case.blr
    s = case.noise_var
    ridge = torch.linalg.solve(
        torch.einsum("ncp,ncq->pq", case.J, case.J) / s + case.delta * torch.eye(len(mean), dtype=torch.float64),
        torch.einsum("ncp,nc->p", case.J, case.y - case.offset) / s,
    )
    assert_close(ridge, mean)
    data = [((case.J, case.offset), case.y)]
    posterior = lw.fit(LinearInParameters(ridge), data, case.likelihood, prior=case.delta, structure="full")
    assert_close(posterior.log_evidence(), log_p)
    assert_close(posterior.covariance(), cov)
    J = case.J.flatten(0, 1)
    marginal = J @ J.T / case.delta + s * torch.eye(len(J), dtype=torch.float64)
    dense = torch.distributions.MultivariateNormal(case.offset.flatten(), marginal).log_prob(case.y.flatten())
    assert_close(posterior.log_evidence(), dense)
    away = lw.fit(LinearInParameters(ridge + 0.1), data, case.likelihood, prior=case.delta, structure="full")
    assert float(away.log_evidence()) < float(log_p)  # only at the mode is it the evidence


def test_weight_space_equals_function_space():
    """V* = K** − K*N S B⁻¹ Sᵀ K_N* with B = I + Sᵀ K S, here with S = I/σ."""
    case = Identities()
    J, (_, J_new) = case.J.flatten(0, 1), oracle.jacobian(case.model, case.x_new)
    J_new = J_new.flatten(0, 1)
    K, cross, own = (a @ b.T / case.delta for a, b in ((J, J), (J_new, J), (J_new, J_new)))
    B = torch.eye(len(J), dtype=torch.float64) + K / case.noise_var
    expected = own - cross @ torch.linalg.solve(B, cross.T) / case.noise_var
    assert_close(case.fit().joint_outputs(case.x_new).cov, expected)


def test_linear_layer_at_its_ridge_solution_is_bayesian_linear_regression():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, generator=g, dtype=torch.float64)
    y = torch.randn(12, 2, generator=g, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    _, J = oracle.jacobian(model, x)
    mean, cov, log_p = oracle.conjugate_regression(J, y, torch.zeros_like(y), 0.4, 1.7)
    nn.utils.vector_to_parameters(mean, model.parameters())
    posterior = lw.fit(model, (x, y), lw.Gaussian(noise_std=0.4), prior=1.7, structure="full")
    assert_close(posterior.log_evidence(), log_p)
    assert_close(posterior.covariance(), cov)
    p = posterior.predict(x)
    assert_close(p.mean, (J @ mean), rtol=1e-10)
    assert_close(p.variance, oracle.functional_cov(J, cov).diagonal(dim1=-2, dim2=-1) + 0.4**2)
