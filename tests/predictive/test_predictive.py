"""Predictions against dense algebra, quadrature and draws made here: limits, splits, shapes, laws of the draws."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import pi, prod

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import lapwing as lw
import oracle
from lapwing.predictive import SiteGaussian
from lapwing.predictive.link_rules import Default
from lapwing.predictive.mixtures import mixture_quantile
from oracle import assert_close

FLOAT64 = torch.float64


class Shaped(nn.Module):
    """A 3-4-K tanh network whose K outputs are given a shape."""

    def __init__(self, datum_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, prod(datum_shape)))
        self.datum_shape = datum_shape

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).reshape(len(x), *self.datum_shape)


@dataclass(frozen=True)
class Setting:
    """A likelihood with an output shape, and the shapes that its targets and labels then have."""

    name: str
    kind: str  # what is predicted: numbers, counts, classes or yes/no
    likelihood: lw.Likelihood
    datum_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    term_shape: tuple[int, ...]  # one log density each
    class_axis: int = -1

    def targets(self, n: int, g: torch.Generator) -> Tensor:
        shape = (n, *self.target_shape)
        if self.kind == "numbers":
            return torch.randn(shape, generator=g, dtype=FLOAT64)
        n_values = {"counts": 4, "classes": 3, "yes/no": 2}[self.kind]
        labels = torch.randint(n_values, shape, generator=g)
        return labels if self.kind == "classes" else labels.double()


SETTINGS = [
    Setting("regression-B", "numbers", lw.Gaussian(noise_std=0.4), (), (), ()),
    Setting("regression-B1", "numbers", lw.Gaussian(noise_std=0.4), (1,), (1,), ()),
    Setting("regression-BC", "numbers", lw.Gaussian(noise_std=[0.4, 0.7]), (2,), (2,), ()),
    Setting("regression-BTC", "numbers", lw.Gaussian(noise_std=0.4), (3, 2), (3, 2), (3,)),
    Setting("regression-BCHW", "numbers", lw.Gaussian(noise_std=0.4, class_axis=1), (2, 2, 3), (2, 2, 3), (2, 3), 1),
    Setting("hetero-B2", "numbers", lw.HeteroscedasticGaussian(), (2,), (), ()),
    Setting("hetero-BT2", "numbers", lw.HeteroscedasticGaussian(), (3, 2), (3,), (3,)),
    Setting("counts-B1", "counts", lw.Poisson(), (1,), (1,), ()),
    Setting("counts-BC", "counts", lw.Poisson(exposure=2.0), (2,), (2,), ()),
    Setting("binary-B", "yes/no", lw.Bernoulli(), (), (), ()),
    Setting("binary-B1", "yes/no", lw.Bernoulli(), (1,), (1,), ()),
    Setting("multilabel-BC", "yes/no", lw.Bernoulli(), (3,), (3,), ()),
    Setting("multilabel-BTC", "yes/no", lw.Bernoulli(), (2, 3), (2, 3), (2,)),
    Setting("classes-BC", "classes", lw.Categorical(), (3,), (), ()),
    Setting("classes-BTC", "classes", lw.Categorical(), (2, 3), (2,), (2,)),
    Setting("classes-BCHW", "classes", lw.Categorical(class_axis=1), (3, 2, 2), (2, 2), (2, 2), 1),
]
BY_NAME = {setting.name: setting for setting in SETTINGS}
PREDICTIVES = ["glm", "bnn"]


def inputs(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64)


@cache
def fitted(name: str, dtype: torch.dtype = FLOAT64, precision: float = 2.0, scale: float = 1.0) -> lw.Posterior:
    setting = BY_NAME[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Shaped(setting.datum_shape).to(dtype)
    y = setting.targets(12, torch.Generator().manual_seed(2))
    data = (inputs(12).to(dtype), y)
    return lw.fit(model, data, setting.likelihood, prior=precision, likelihood_scale=scale, structure="full")


def targets(name: str, n: int) -> Tensor:
    return BY_NAME[name].targets(n, torch.Generator().manual_seed(3))


def is_classes(setting: Setting) -> bool:
    return setting.kind in ("classes", "yes/no")


every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
every_predictive = pytest.mark.parametrize("predictive", PREDICTIVES)


# --- shapes, dtypes, splits ---------------------------------------------------------------------------------------


@every_setting
@every_predictive
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
def test_shapes_and_dtypes_of_every_field(setting: Setting, predictive: str, dtype: torch.dtype):
    p = fitted(setting.name, dtype).predict(inputs(5, 9).to(dtype), predictive=predictive, n_samples=16)
    per_target, per_output = (5, *setting.target_shape), (5, *setting.datum_shape)
    shapes = {"epistemic": per_target, "aleatoric": per_target}
    if is_classes(setting):
        shapes |= {"probs": per_output, "entropy": per_target}
        assert p.label.shape == per_target
        assert p.label.dtype == torch.int64
        for part in p.class_variance:
            assert part.shape == per_output
            assert part.dtype == dtype
    else:
        shapes |= dict.fromkeys(["mean", "variance", "std"], per_target)
        low, high = p.interval(0.9)
        assert low.shape == high.shape == per_target
        assert low.dtype == high.dtype == dtype
        assert bool((low <= high).all())
    for field, shape in shapes.items():
        assert tuple(getattr(p, field).shape) == shape, field
        assert getattr(p, field).dtype == dtype, field
    log_prob = p.log_prob(targets(setting.name, 5))
    assert tuple(log_prob.shape) == (5, *setting.term_shape)
    assert log_prob.dtype == dtype


@every_setting
@every_predictive
def test_total_is_epistemic_plus_aleatoric(setting: Setting, predictive: str):
    p = fitted(setting.name).predict(inputs(6, 9), predictive=predictive, n_samples=64)
    total = p.entropy if is_classes(setting) else p.variance
    assert_close(p.epistemic + p.aleatoric, total, rtol=1e-15)
    assert bool((p.epistemic >= 0).all())
    assert bool((p.aleatoric >= 0).all())
    assert float(p.epistemic.max()) > 1e-3  # a split that calls everything aleatoric would pass the sum
    assert float(p.aleatoric.min()) > 0
    if is_classes(setting):
        whole, epistemic, aleatoric = p.class_variance
        assert_close(epistemic + aleatoric, whole, rtol=1e-15)
        assert_close(whole, p.probs * (1 - p.probs), rtol=1e-12)
        assert bool((epistemic >= 0).all())
        assert float(epistemic.max()) > 1e-4


@every_setting
@every_predictive
def test_distribution_agrees_with_the_fields(setting: Setting, predictive: str):
    """The torch.distributions object has the same density and moments; targets go in with the class axis last."""
    p = fitted(setting.name).predict(inputs(5, 9), predictive=predictive, n_samples=64)
    y = targets(setting.name, 5)
    last = y.movedim(setting.class_axis, -1) if setting.datum_shape == setting.target_shape != () else y
    log_prob = p.distribution.log_prob(last)
    if log_prob.ndim > 1 + len(setting.term_shape):  # outputs of a term that are independent stay apart
        log_prob = log_prob.sum(-1)
    # The object of a count is a mixture of 32 rates, its log_prob an integral over the rate.
    assert_close(log_prob, p.log_prob(y), rtol=1e-9 if "counts" in setting.name else 1e-12)
    if is_classes(setting):
        probs = p.probs.movedim(setting.class_axis, -1) if setting.datum_shape else p.probs
        assert_close(p.distribution.probs, probs, rtol=1e-12)
        return
    in_last_axis = setting.datum_shape == setting.target_shape != ()
    mean, variance = (v.movedim(setting.class_axis, -1) if in_last_axis else v for v in (p.mean, p.variance))
    assert_close(p.distribution.mean, mean, rtol=1e-10)
    assert_close(p.distribution.variance, variance, rtol=1e-8)


@every_setting
@every_predictive
def test_repeated_calls_and_single_inputs_agree(setting: Setting, predictive: str):
    posterior, x = fitted(setting.name), inputs(4, 9)
    field = "probs" if is_classes(setting) else "variance"
    whole = getattr(posterior.predict(x, predictive=predictive, n_samples=32), field)
    again = getattr(posterior.predict(x, predictive=predictive, n_samples=32), field)
    assert torch.equal(whole, again)
    one = getattr(posterior.predict(x[2:3], predictive=predictive, n_samples=32), field)
    assert_close(one[0], whole[2], rtol=1e-12)
    other = posterior.predict(x, predictive="bnn", n_samples=32, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(getattr(other, field), getattr(posterior.predict(x, predictive="bnn", n_samples=32), field))


# --- limits ---------------------------------------------------------------------------------------------------------


@every_setting
@every_predictive
def test_a_strong_prior_gives_the_network_itself(setting: Setting, predictive: str):
    """δ → ∞: no doubt about the weights is left."""
    posterior, x = fitted(setting.name, precision=1e14), inputs(4, 9)
    p = posterior.predict(x, predictive=predictive, n_samples=16)
    f = posterior.outputs(x).mean
    assert float(p.epistemic.max()) < 1e-9
    if setting.kind == "classes":
        assert_close(p.probs, torch.softmax(f, setting.class_axis), rtol=1e-6)
    elif setting.kind == "yes/no":
        assert_close(p.probs, torch.sigmoid(f), rtol=1e-6)
    elif setting.kind == "counts":
        assert_close(p.mean, f.exp() * setting.likelihood.exposure, rtol=1e-6)
    elif isinstance(setting.likelihood, lw.Gaussian):
        assert_close(p.mean, f, rtol=1e-6)
        noise_var = setting.likelihood.resolved().square()
        assert_close(
            p.aleatoric, noise_var.expand_as(f) if len(noise_var) > 1 else torch.full_like(f, float(noise_var))
        )
    else:
        assert_close(p.mean, f[..., 0] / f[..., 1].exp(), rtol=1e-6)
        assert_close(p.aleatoric, (-f[..., 1]).exp(), rtol=1e-6)


@every_setting
def test_without_data_the_prior_speaks(setting: Setting):
    """A vanishing likelihood scale leaves Σ = P₀⁻¹: functional covariance J Jᵀ/δ."""
    posterior, x = fitted(setting.name, scale=1e-14), inputs(4, 9)
    _, J = oracle.jacobian(posterior.linearised.network.model, x)
    assert_close(posterior.outputs(x).cov, J @ J.mT / 2.0, rtol=1e-9)
    assert float(posterior.effective_dimension()) < 1e-9


def test_linearised_gaussian_is_bayesian_linear_regression():
    """Covariance, noise and density of a (B, C) regression, from the conjugate formulas on Jacobian features."""
    name = "regression-BC"
    posterior, x = fitted(name), inputs(5, 9)
    noise = torch.tensor([0.4, 0.7], dtype=FLOAT64)
    f, J = oracle.jacobian(posterior.linearised.network.model, inputs(12))
    y = BY_NAME[name].targets(12, torch.Generator().manual_seed(2))
    _, Sigma, _ = oracle.conjugate_regression(J, y, f - J @ posterior.mean, noise, 2.0)
    m, J_new = oracle.jacobian(posterior.linearised.network.model, x)
    total = oracle.functional_cov(J_new, Sigma) + torch.diag(noise**2)
    p = posterior.predict(x)
    assert_close(p.mean, m)
    assert_close(p.variance, total.diagonal(dim1=-2, dim2=-1))
    assert_close(p.distribution.covariance_matrix, total)
    y_new = targets(name, 5)
    assert_close(p.log_prob(y_new), torch.distributions.MultivariateNormal(m, total).log_prob(y_new))
    half = scipy.stats.norm.ppf(0.95) * p.std
    for end, expected in zip(p.interval(0.9), (m - half, m + half), strict=True):
        assert_close(end, expected)


# --- against integrals computed here -----------------------------------------------------------------------------


def binary_integral(function, m: Tensor, v: Tensor) -> Tensor:
    """E[function(f)] by the trapezoid rule on 20,001 points: exact for smooth functions to near rounding."""
    z = torch.linspace(-9, 9, 20_001, dtype=FLOAT64)
    return function(m[..., None] + v.sqrt()[..., None] * z) @ torch.softmax(-0.5 * z**2, 0)


def class_integral(function, m: Tensor, cov: Tensor, n: int = 30) -> Tensor:
    """E[function(f)] for three logits by an n³ Gauss–Hermite rule; m (B, 3), cov (B, 3, 3); keeps trailing axes."""
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(n))
    eps = torch.cartesian_prod(nodes, nodes, nodes)
    w = torch.cartesian_prod(weights, weights, weights).prod(-1)
    f = m[:, None] + eps @ torch.linalg.cholesky(cov).mT
    return torch.tensordot(function(f), w / w.sum(), dims=([1], [0]))


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


@pytest.mark.parametrize("name", ["binary-B", "binary-B1", "multilabel-BC"])
def test_binary_split_is_the_mutual_information(name: str):
    posterior, x = fitted(name, precision=0.3), inputs(6, 9)
    p, out = posterior.predict(x), posterior.outputs(x)
    mean = binary_integral(torch.sigmoid, out.mean, out.var)

    def both(f: Tensor) -> Tensor:
        return entropy(torch.stack([torch.sigmoid(f), torch.sigmoid(-f)], -1))

    expected_entropy = binary_integral(both, out.mean, out.var)
    noise = binary_integral(lambda f: torch.sigmoid(f) * torch.sigmoid(-f), out.mean, out.var)
    assert_close(p.probs, mean, rtol=1e-9)
    assert_close(p.aleatoric, expected_entropy, rtol=1e-8)
    assert_close(p.epistemic, entropy(torch.stack([mean, 1 - mean], -1)) - expected_entropy, rtol=1e-7)
    assert_close(p.class_variance.aleatoric, noise, rtol=1e-8)
    assert_close(p.class_variance.epistemic, mean * (1 - mean) - noise, rtol=1e-7)


def test_class_split_is_the_mutual_information():
    posterior, x = fitted("classes-BC"), inputs(6, 9)
    p, out = posterior.predict(x, n_samples=2**15), posterior.outputs(x)
    mean = class_integral(lambda f: torch.softmax(f, -1), out.mean, out.cov)
    mean_entropy = class_integral(lambda f: entropy(torch.softmax(f, -1)), out.mean, out.cov)
    noise = class_integral(lambda f: torch.softmax(f, -1) * (1 - torch.softmax(f, -1)), out.mean, out.cov)
    information = entropy(mean) - mean_entropy
    assert_close(p.probs, mean, rtol=2e-4)
    assert (p.epistemic - information).abs().max() < 2e-4 < 0.01 * information.max()
    assert_close(p.class_variance.aleatoric, noise, rtol=2e-4)


def test_default_class_link_is_accurate_at_its_default_number_of_draws():
    """Quasi-Monte Carlo: independent draws would be off by 0.01 at n = 1000."""
    posterior, x = fitted("classes-BC"), inputs(20, 9)
    out = posterior.outputs(x)
    exact = class_integral(lambda f: torch.softmax(f, -1), out.mean, out.cov)
    assert (posterior.predict(x).probs - exact).abs().max() < 2e-3


@pytest.mark.parametrize("name", ["counts-B1", "counts-BC"])
def test_count_moments_are_those_of_a_lognormal_rate(name: str):
    posterior, x = fitted(name), inputs(6, 9)
    p, out = posterior.predict(x), posterior.outputs(x)
    exposure = BY_NAME[name].likelihood.exposure
    rate = binary_integral(torch.exp, out.mean, out.var) * exposure
    square = binary_integral(lambda f: (2 * f).exp(), out.mean, out.var) * exposure**2
    assert_close(p.mean, rate, rtol=1e-9)
    assert_close(p.aleatoric, rate, rtol=1e-9)
    assert_close(p.epistemic, square - rate**2, rtol=1e-8)
    y = targets(name, 6)

    def mass(k: Tensor) -> Tensor:
        """P(Y = k) for every output."""
        return binary_integral(lambda f: torch.distributions.Poisson(exposure * f.exp()).log_prob(k).exp(), *moments)

    moments = out.mean, out.var
    table = torch.stack([mass(k) for k in y.unique()])  # (values, B, C)
    index = torch.searchsorted(y.unique(), y)
    expected = table.gather(0, index[None])[0].log().sum(-1)
    assert_close(p.log_prob(y), expected, rtol=1e-6)


def test_heteroscedastic_split_by_quadrature():
    """Mean μ = f₁ e^{−f₂} and variance e^{−f₂} averaged over the Gaussian of (f₁, f₂), by a tensor rule."""
    posterior, x = fitted("hetero-B2", precision=20.0), inputs(6, 9)
    out = posterior.outputs(x)
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(60))
    w = torch.cartesian_prod(weights, weights).prod(-1) / (2 * pi)
    f = out.mean[:, None] + torch.cartesian_prod(nodes, nodes) @ torch.linalg.cholesky(out.cov).mT
    mu, variance = f[..., 0] * (-f[..., 1]).exp(), (-f[..., 1]).exp()
    mean = mu @ w
    p = posterior.predict(x, n_samples=2**14)
    assert_close(p.mean, mean, rtol=1e-3)
    assert_close(p.aleatoric, variance @ w, rtol=1e-3)
    assert_close(p.epistemic, mu**2 @ w - mean**2, rtol=5e-3)


# --- intervals ------------------------------------------------------------------------------------------------------


def below(p: lw.Prediction, y: Tensor) -> Tensor:
    return p.distribution.cdf(y)


@pytest.mark.parametrize("name", ["regression-B", "regression-B1", "hetero-B2", "hetero-BT2"])
@every_predictive
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_hold_their_share_of_the_predictive(name: str, predictive: str, level: float):
    p = fitted(name).predict(inputs(5, 9), predictive=predictive, n_samples=64)
    low, high = p.interval(level)
    assert_close(below(p, low), torch.full_like(low, (1 - level) / 2), rtol=1e-9)
    assert_close(below(p, high), torch.full_like(low, (1 + level) / 2), rtol=1e-9)


@pytest.mark.parametrize("std", [0.1, 0.6, 5.0])
def test_a_mixture_of_equals_has_the_quantiles_of_one(std: float):
    means, stds = (torch.full((3, 2), value, dtype=FLOAT64) for value in (0.7, std))
    for level in (0.01, 0.3, 0.975):
        expected = 0.7 + std * scipy.stats.norm.ppf(level)
        assert_close(mixture_quantile(means, stds, level), torch.full((2,), expected, dtype=FLOAT64), rtol=1e-12)


def test_outputs_over_a_temperature(seed: int):
    """f / T has the mean over T and the covariance over T²."""
    mean, root = torch.randn(4, 1, 3, dtype=FLOAT64), torch.randn(4, 1, 3, 3, dtype=FLOAT64)
    cooler = SiteGaussian(mean, root @ root.mT).tempered(2.5)
    assert_close(cooler.mean, mean / 2.5)
    assert_close(cooler.cov, (root / 2.5) @ (root / 2.5).mT)


@every_predictive
def test_count_intervals_are_the_narrowest_that_hold_the_level(predictive: str):
    p = fitted("counts-BC").predict(inputs(5, 9), predictive=predictive, n_samples=64)
    support = torch.arange(400, dtype=FLOAT64)
    mass = p.distribution.log_prob(support.reshape(-1, 1, 1)).exp()
    assert_close(mass.sum(0), torch.ones(5, 2), rtol=1e-9)
    cdf = mass.cumsum(0)
    for end, level in zip(p.interval(0.9), (0.05, 0.95), strict=True):
        expected = (cdf < level - 1e-12).sum(0).double()
        assert torch.equal(end, expected)


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["regression-B1", "regression-BC", "hetero-B2"])
@every_predictive
def test_intervals_cover_draws_from_the_distribution(name: str, predictive: str, seed: int):
    """Nominal coverage under the model's own law; intervals from the standard deviation of f alone fail."""
    n = 20_000
    p = fitted(name).predict(inputs(3, 9), predictive=predictive, n_samples=200)
    y = p.distribution.sample((n,))
    low, high = p.interval(0.9)
    error = 4.5 * (0.9 * 0.1 / n) ** 0.5
    inside = ((y >= low) & (y <= high)).double().mean(0)
    assert (inside - 0.9).abs().max() < error
    half = scipy.stats.norm.ppf(0.95) * p.epistemic.sqrt()  # the planted bug: observation noise forgotten
    narrow = ((y - p.mean).abs() <= half).double().mean(0)
    assert (narrow - 0.9).abs().max() > error


# --- draws ----------------------------------------------------------------------------------------------------------


def assert_covariance(draws: Tensor, cov: Tensor, mean: Tensor | None = None) -> None:
    """Every entry of the second moment of n draws (n, P) within 5 standard errors of `cov`."""
    gap = draws - (draws.mean(0) if mean is None else mean)
    d = cov.diagonal()
    error = ((d[:, None] * d + cov**2) / len(draws)).sqrt()
    assert ((gap.T @ gap / len(draws) - cov).abs() / error).max() < 5


def transposed_draws(precision: Tensor, n: int, g: torch.Generator) -> Tensor:
    """The planted bug: L⁻¹ ε in place of L⁻ᵀ ε, for P = L Lᵀ."""
    eps = torch.randn(n, len(precision), generator=g, dtype=FLOAT64)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(precision), eps.T, upper=False).T


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
@pytest.mark.parametrize("n", [4, 40])
def test_the_factor_behind_samples_is_a_root_of_the_covariance(structure: str, n: int):
    """Exactly, and without chance: the map from ε to weights is read off column by column. Few data, and many."""
    g = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Shaped((3,)).double()
    posterior = lw.fit(model, (inputs(n), torch.randint(3, (n,), generator=g)), "classification", structure=structure)
    root = posterior.precision.half_solve(torch.eye(posterior.layout.p, dtype=FLOAT64))  # rows are R e_i
    assert_close(root.T @ root, posterior.covariance(), rtol=1e-10)
    L = torch.linalg.cholesky(posterior.precision.to_dense())
    wrong = torch.linalg.inv(L)  # as above
    if structure != "diag":
        with pytest.raises(AssertionError):
            assert_close(wrong @ wrong.T, posterior.covariance(), rtol=1e-2)


@pytest.mark.statistical
@pytest.mark.parametrize("structure", ["full", "block"])
@pytest.mark.parametrize("n_data", [4, 40])
def test_samples_have_the_covariance(structure: str, n_data: int, generator: torch.Generator):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Shaped((3,)).double()
    y = torch.randint(3, (n_data,), generator=generator)
    posterior = lw.fit(model, (inputs(n_data), y), "classification", prior=0.5, structure=structure)
    n = 50_000
    assert_covariance(posterior.sample(n, generator), posterior.covariance(), posterior.mean)
    wrong = transposed_draws(posterior.precision.to_dense(), n, generator)
    with pytest.raises(AssertionError):
        assert_covariance(wrong, posterior.covariance())


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["regression-BC", "classes-BC", "binary-B"])
def test_function_draws_have_the_joint_covariance(name: str, generator: torch.Generator):
    """Across inputs too; a transposed factor fails the same test."""
    posterior, x, n = fitted(name), inputs(3, 9), 50_000
    joint, out = posterior.joint_outputs(x), posterior.outputs(x)
    draws = posterior.functions(n, generator)(x).reshape(n, -1)
    assert_covariance(draws, joint.cov, joint.mean)
    k = draws.shape[1] // 3
    assert_covariance(draws[:, :k], out.cov[0], out.mean[0].reshape(-1))
    _, J = oracle.jacobian(posterior.linearised.network.model, x)
    wrong = transposed_draws(posterior.precision.to_dense(), n, generator) @ J.flatten(0, 1).T
    with pytest.raises(AssertionError):
        assert_covariance(wrong, joint.cov, torch.zeros_like(joint.mean))


@every_setting
def test_function_draws_are_functions(setting: Setting):
    """The same function at every call, whatever else is asked for at the same time."""
    posterior, x = fitted(setting.name), inputs(6, 9)
    draws = posterior.functions(5)
    whole = draws(x)
    assert tuple(whole.shape) == (5, 6, *setting.datum_shape)
    assert torch.equal(whole, draws(x))
    assert_close(draws(x[[4, 1]]), whole[:, [4, 1]], rtol=1e-12)
    assert torch.equal(whole, posterior.functions(5)(x))
    fresh = posterior.functions(5, torch.Generator().manual_seed(8))(x)
    assert not torch.allclose(fresh, whole)


class LinearModel(nn.Module):
    """Linear in its parameters, not in its input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([x.sin(), x.prod(-1, keepdim=True)], -1))


def linear_posterior(likelihood: str | lw.Likelihood, y: Tensor) -> lw.Posterior:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = LinearModel().double()
    return lw.fit(model, (inputs(len(y)), y), likelihood, prior=0.7, structure="full")


def test_network_draws_of_a_linear_model_are_its_linear_draws():
    """With the same ε the network itself and its linearisation are one function."""
    posterior = linear_posterior("classification", torch.arange(12) % 3)
    x = inputs(5, 9)
    linear = posterior.functions(40)(x)
    probs = torch.softmax(linear, -1).mean(0)
    sampled = posterior.predict(x, predictive="bnn", n_samples=40)
    assert_close(sampled.probs, probs, rtol=1e-10)
    assert_close(sampled.aleatoric, entropy(torch.softmax(linear, -1)).mean(0), rtol=1e-10)
    curved = fitted("classes-BC")
    with pytest.raises(AssertionError):
        probs = torch.softmax(curved.functions(40)(x), -1).mean(0)
        assert_close(curved.predict(x, predictive="bnn", n_samples=40).probs, probs, rtol=1e-3)


@pytest.mark.statistical
def test_sampled_and_linearised_laws_agree_for_a_linear_model(generator: torch.Generator):
    """Moments of the two predictives; for a tanh network the same comparison fails."""
    n, x = 3_000, inputs(4, 9)

    def gap(posterior: lw.Posterior) -> float:
        glm = posterior.predict(x)
        bnn = posterior.predict(x, predictive="bnn", n_samples=n, generator=generator)
        means = (bnn.mean - glm.mean).abs() / (glm.epistemic / n).sqrt()
        variances = (bnn.epistemic - glm.epistemic).abs() / (glm.epistemic * (2 / n) ** 0.5)
        return float(torch.maximum(means, variances).max())

    y = torch.randn(12, 3, generator=generator, dtype=FLOAT64)
    assert gap(linear_posterior(lw.Gaussian(noise_std=0.4), y)) < 4.5
    assert gap(fitted("regression-BC", precision=0.1)) > 4.5


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["classes-BC", "binary-B1"])
def test_epistemic_is_the_information_of_independent_draws(name: str, generator: torch.Generator):
    """Draws with NumPy from outputs(x); a standard deviation in place of a variance would be caught."""
    posterior, x = fitted(name, precision=0.5), inputs(5, 9)
    out, n = posterior.outputs(x), 200_000
    information = posterior.predict(x, n_samples=4096).epistemic.reshape(-1)

    def by_draws(cov: np.ndarray) -> Tensor:
        rng, found = np.random.default_rng(1), []
        for m, c in zip(out.mean.numpy(), cov, strict=True):
            f = torch.as_tensor(rng.multivariate_normal(m, c, size=n))
            p = torch.softmax(f, -1) if f.shape[-1] > 1 else torch.cat([torch.sigmoid(f), torch.sigmoid(-f)], -1)
            found.append(entropy(p.mean(0)) - entropy(p).mean())
        return torch.stack(found)

    assert (by_draws(out.cov.numpy()) - information).abs().max() < 3e-3
    assert (by_draws(out.cov.numpy() @ out.cov.numpy()) - information).abs().max() > 3e-3


# --- links ------------------------------------------------------------------------------------------------------------


def probit(m: Tensor, V: Tensor) -> Tensor:
    return torch.softmax(m / (1 + pi / 8 * V.diagonal(dim1=-2, dim2=-1)).sqrt(), -1)


def pairwise(m: Tensor, V: Tensor) -> Tensor:
    """One class and one rival at a time."""
    c, q = m.shape[-1], torch.zeros_like(m)
    for k in range(c):
        terms = [
            (-(m[..., k] - m[..., j]) / (1 + pi / 8 * (V[..., k, k] + V[..., j, j] - 2 * V[..., k, j])).sqrt()).exp()
            for j in range(c)
        ]
        q[..., k] = 1 / sum(terms)
    return q / q.sum(-1, keepdim=True)


def bridge(m: Tensor, V: Tensor, normalise: bool = False) -> Tensor:
    c, s = m.shape[-1], V.sum(-1)
    m = m - s * m.sum(-1, keepdim=True) / s.sum(-1, keepdim=True)
    v = V.diagonal(dim1=-2, dim2=-1) - s**2 / s.sum(-1, keepdim=True)
    if normalise:
        scale = v.mean(-1, keepdim=True) / (c / 2) ** 0.5
        m, v = m / scale.sqrt(), v / scale
    alpha = (1 - 2 / c + m.exp() / c**2 * (-m).exp().sum(-1, keepdim=True)) / v
    return alpha / alpha.sum(-1, keepdim=True)


LINKS = {
    "probit": probit,
    "pairwise": pairwise,
    "bridge": bridge,
    "bridge_norm": lambda m, V: bridge(m, V, normalise=True),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", ["classes-BC", "classes-BTC", "classes-BCHW"])
def test_closed_form_links_through_predict(link: str, name: str):
    """The formula on the mean and covariance of outputs(x), term by term."""
    posterior, x = fitted(name), inputs(4, 9)
    out = posterior.outputs(x)
    index = oracle.site_index(BY_NAME[name].datum_shape, BY_NAME[name].class_axis)
    m = out.mean.reshape(4, -1)[:, index]
    V = torch.stack([out.cov[:, ks[:, None], ks] for ks in index], 1)
    expected = torch.zeros(4, index.numel(), dtype=FLOAT64)
    expected[:, index.flatten()] = LINKS[link](m, V).flatten(1)
    p = posterior.predict(x, link=link)
    assert_close(p.probs.reshape(4, -1), expected, rtol=1e-10)
    assert_close(p.epistemic + p.aleatoric, p.entropy, rtol=1e-15)
    y = targets(name, 4)
    chosen = p.probs.movedim(BY_NAME[name].class_axis, -1).gather(-1, y[..., None])[..., 0]
    assert_close(p.log_prob(y), chosen.log(), rtol=1e-10)


@pytest.mark.parametrize("name", ["binary-B", "binary-B1", "multilabel-BC"])
def test_one_logit_links_through_predict(name: str):
    posterior, x = fitted(name), inputs(4, 9)
    out = posterior.outputs(x)
    formula = torch.sigmoid(out.mean / (1 + pi / 8 * out.var).sqrt())
    assert_close(posterior.predict(x, link="probit").probs, formula, rtol=1e-10)
    exact = binary_integral(torch.sigmoid, out.mean, out.var)
    assert_close(posterior.predict(x, link="quadrature").probs, exact, rtol=1e-9)
    assert (posterior.predict(x, link="mc", n_samples=4096).probs - exact).abs().max() < 2e-3
    for link in ("probit", "quadrature", "mc"):  # yes and no
        total = posterior.predict(x, link=link).log_probs.logsumexp(-1)
        assert_close(total.exp(), torch.ones_like(total))


def test_the_default_link_is_what_its_documentation_says():
    """Quadrature for one logit, quasi-Monte Carlo for classes."""
    binary, classes, x = fitted("binary-B1"), fitted("classes-BC"), inputs(4, 9)
    assert torch.equal(binary.predict(x).probs, binary.predict(x, link="quadrature").probs)
    assert torch.equal(classes.predict(x).probs, classes.predict(x, link="mc").probs)
    assert "quadrature for one logit" in Default.__doc__
    assert "quasi-Monte Carlo draws for classes" in Default.__doc__
    with pytest.raises(lw.LapwingError):
        classes.predict(x, link="quadrature")
    with pytest.raises(lw.LapwingError):
        binary.predict(x, link="bridge")


def test_a_custom_likelihood_scores_targets_by_averaging_its_density():
    """The Gaussian written by hand: its predictive density converges to the exact one."""
    setting, x = BY_NAME["regression-B1"], inputs(5, 9)
    exact = fitted("regression-B1")
    # torch 2.4 cannot check arguments under vmap
    density = lambda f, y: torch.distributions.Normal(f[0], 0.4, validate_args=False).log_prob(y)  # noqa: E731
    likelihood = lw.CustomLikelihood(density, mean=lambda f: f[..., 0])
    y = setting.targets(12, torch.Generator().manual_seed(2))
    own = lw.fit(exact.linearised.network.model, (inputs(12), y[:, 0]), likelihood, prior=2.0, structure="full")
    assert_close(own.covariance(), exact.covariance(), rtol=1e-9)
    y_new = targets("regression-B1", 5)
    p = own.predict(x, n_samples=2**12)
    assert_close(p.log_prob(y_new[:, 0]), exact.predict(x).log_prob(y_new), rtol=1e-3)
    assert_close(p.mean.reshape(-1), exact.predict(x).mean[:, 0], rtol=1e-3)
