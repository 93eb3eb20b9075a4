"""Likelihoods against autograd of their own log density, enumeration, and other people's densities."""

from __future__ import annotations

from math import log, pi

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.testing import assert_close

from lapwing.errors import InputError, InputTypeError, LapwingError, NumericalError, ShapeError
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    CustomLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Sites,
    check_likelihood,
)

N, T, C = 4, 3, 3


def exact(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    assert_close(a, b, rtol=1e-12, atol=atol)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(*shape: int, high: int = C, seed: int = 1) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def softmax_term(f: Tensor, y: Tensor) -> Tensor:
    return torch.log_softmax(f, -1).gather(-1, y[None])[0]


def _ignored() -> Tensor:
    y = labels(N, T)
    y[0, 1] = -100
    return y


# name → likelihood, f (N, T, C), encoded y
CASES: dict[str, tuple[Likelihood, Tensor, Tensor]] = {
    "categorical": (Categorical(), 2 * normal(N, T, C), labels(N, T)),
    "categorical-weighted": (Categorical(weight=[0.5, 2.0, 0.0]), 2 * normal(N, T, C), _ignored()),
    "categorical-two": (Categorical(), 2 * normal(N, T, 2), labels(N, T, high=2)),
    "bernoulli": (Bernoulli(), 2 * normal(N, T, C), labels(N, T, C, high=2)),
    "poisson": (Poisson(), normal(N, T, C), torch.stack([labels(N, T, C, high=6).double(), normal(N, T, C)], -1)),
    "gaussian": (Gaussian(0.7), normal(N, T, C), normal(N, T, C, seed=5)),
    "gaussian-per-output": (Gaussian([0.7, 0.2, 1.5]), normal(N, T, C), normal(N, T, C, seed=5)),
    "hetero-exp": (HeteroscedasticGaussian(), normal(N, T, 2), normal(N, T, seed=5)),
    "hetero-softplus": (HeteroscedasticGaussian("softplus"), normal(N, T, 2), normal(N, T, seed=5)),
    "custom": (CustomLikelihood(softmax_term), 2 * normal(N, T, C), labels(N, T)),
}
CANONICAL = [name for name, (likelihood, _, _) in CASES.items() if likelihood.canonical]
every_case = pytest.mark.parametrize("case", CASES)


def autograd_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """−∇² of the log density, term by term."""
    terms = zip(f.reshape(-1, f.shape[-1]), y.reshape(-1, *y.shape[f.ndim - 1 :]))
    rows = [
        -torch.autograd.functional.hessian(lambda g, t=t: likelihood.log_prob(g[None], t[None])[0], g) for g, t in terms
    ]
    return torch.stack(rows).reshape(*f.shape, f.shape[-1])


# --- laws that hold for every likelihood ----------------------------------------------------------------


@every_case
def test_residual_is_the_gradient_of_the_log_density(case):
    likelihood, f, y = CASES[case]
    g = f.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(likelihood.log_prob(g, y).sum(), g)
    assert likelihood.log_prob(f, y).shape == f.shape[:-1]
    exact(likelihood.residual(f, y), gradient)


@pytest.mark.parametrize("case", [name for name in CANONICAL if name != "custom"])
def test_hessian_is_minus_the_second_derivative(case):
    likelihood, f, y = CASES[case]
    exact(likelihood.hessian(f, y), autograd_hessian(likelihood, f, y))


@every_case
def test_root_times_its_transpose_is_the_hessian(case):
    likelihood, f, y = CASES[case]
    S = likelihood.hessian_root(f, y)
    assert S.shape[:-1] == f.shape
    exact(S @ S.mT, likelihood.hessian(f, y))


@every_case
def test_parts_add_up(case):
    likelihood, f, y = CASES[case]
    scales = likelihood.part_scales()
    roots, residuals = likelihood.part_roots(f, y), likelihood.part_residuals(f, y)
    assert len(scales) == len(roots) == len(residuals)
    exact(sum(c * S @ S.mT for c, S in zip(scales, roots)), likelihood.hessian(f, y))
    exact(sum(c * r for c, r in zip(scales, residuals)), likelihood.residual(f, y))


@every_case
def test_statistics_are_additive_and_give_the_log_likelihood(case):
    likelihood, f, y = CASES[case]
    statistics = likelihood.statistics(f[:1], y[:1]) + likelihood.statistics(f[1:], y[1:])
    assert statistics.dtype == torch.float64
    exact(likelihood.log_lik(statistics), likelihood.log_prob(f, y).sum())


@every_case
def test_terms_do_not_depend_on_their_arrangement(case):
    likelihood, f, y = CASES[case]
    flat_f, flat_y = f.flatten(0, 1), y.flatten(0, 1)
    exact(likelihood.log_prob(flat_f, flat_y), likelihood.log_prob(f, y).flatten())
    exact(likelihood.hessian(flat_f[2], flat_y[2]), likelihood.hessian(f, y)[0, 2])


@every_case
def test_outputs_keep_the_dtype_of_f(case):
    likelihood, f, y = CASES[case]
    f = f.float()
    results = [likelihood.log_prob(f, y), likelihood.residual(f, y), likelihood.hessian(f, y)]
    results += [likelihood.hessian_root(f, y), *likelihood.part_roots(f, y), *likelihood.part_residuals(f, y)]
    assert {t.dtype for t in results} == {torch.float32}


@every_case
def test_verbs_work_without_gradients_and_under_vmap(case):
    likelihood, f, y = CASES[case]
    with torch.no_grad():
        expected = likelihood.residual(f, y), likelihood.hessian_root(f, y), likelihood.log_prob(f, y)
    with torch.inference_mode():
        exact(likelihood.residual(f, y), expected[0])
    if case != "custom":  # its root looks at eigenvalues, which vmap does not allow
        exact(torch.func.vmap(likelihood.hessian_root)(f, y), expected[1])
    exact(torch.func.vmap(likelihood.log_prob)(f, y), expected[2])
    exact(torch.func.vmap(likelihood.residual)(f, y), expected[0])


@every_case
def test_check_likelihood_passes(case):
    likelihood, f, y = CASES[case]
    if case == "poisson":
        y = (y[..., 0], y[..., 1].exp())
    report = check_likelihood(likelihood, f, y)
    assert report.n_terms == N * T
    assert report.hessian_error is not None and report.hessian_error < 1e-8
    assert report.residual_error < 1e-8 and report.root_error < 1e-12


# --- Fisher: E[r rᵀ] = Λ -----------------------------------------------------------------------------------


def test_categorical_fisher_by_enumeration():
    likelihood, f, y = Categorical(), *CASES["categorical"][1:]
    p = torch.softmax(f, -1)
    rs = [likelihood.residual(f, torch.full_like(y, c)) for c in range(C)]
    exact(
        sum(p[..., c, None, None] * r[..., :, None] * r[..., None, :] for c, r in enumerate(rs)),
        likelihood.hessian(f, y),
    )


def test_bernoulli_fisher_by_enumeration():
    f, likelihood = normal(5, 1), Bernoulli()
    p = torch.sigmoid(f)
    r1, r0 = likelihood.residual(f, torch.ones_like(f)), likelihood.residual(f, torch.zeros_like(f))
    exact(p * r1**2 + (1 - p) * r0**2, likelihood.hessian(f, f)[..., 0])


def test_poisson_fisher_by_enumeration():
    f, likelihood = normal(5, 1), Poisson(exposure=2.0)
    counts = torch.arange(200.0, dtype=torch.float64)[:, None, None].expand(-1, 5, 1)
    y = likelihood.encode(counts.reshape(-1, 1), Sites((1,)), 1000).reshape(200, 5, 1, 2)
    f = f.expand(200, -1, -1)
    p, r = likelihood.log_prob(f, y).exp(), likelihood.residual(f, y)[..., 0]
    exact((p * r**2).sum(0), likelihood.hessian(f, y)[0, :, 0, 0])


def test_exposures_multiply_the_rate():
    """Of each datum, or the same for all."""
    f, counts, exposures = normal(5, 1), torch.tensor([0.0, 3, 1, 7, 2]).double(), torch.tensor([0.5, 1, 2, 4, 9])
    density = torch.distributions.Poisson(exposures.double()[:, None] * f.exp()).log_prob(counts[:, None])
    found = Poisson().log_prob(f, Poisson().encode((counts, exposures), Sites((1,)), 5)[:, 0])
    exact(found, density[:, 0])
    twice = Poisson(exposure=2.0)
    pairs = Poisson().encode((counts, torch.full((5,), 2.0)), Sites((1,)), 5)
    exact(twice.encode(counts, Sites((1,)), 5), pairs)


@pytest.mark.parametrize("link", ["exp", "softplus"])
def test_heteroscedastic_fisher_by_quadrature(link):
    likelihood, f = HeteroscedasticGaussian(link), normal(6, 2)
    mean, variance = likelihood.natural_to_moments(f)
    # Five-point Gauss–Hermite: exact for the quartic r rᵀ.
    z, w = (torch.tensor(values) for values in np.polynomial.hermite_e.hermegauss(5))
    w = w / w.sum()
    total = torch.zeros(6, 2, 2, dtype=torch.float64)
    for z_i, w_i in zip(z, w):
        r = likelihood.residual(f, mean + variance.sqrt() * z_i)
        total += w_i * r[..., :, None] * r[..., None, :]
    exact(total, likelihood.hessian(f, mean))


def sampled_error(sampled: list[Tensor], expected: Tensor) -> float:
    """Largest deviation of the mean of r rᵀ over draws (n, ..., C) from `expected`, in standard errors."""
    worst = 0.0
    for r, target in zip(sampled, expected):
        outer = r[..., :, None] * r[..., None, :]
        error = (outer.mean(0) - target).abs()
        standard = outer.std(0) / len(outer) ** 0.5
        worst = max(worst, float(torch.where(standard > 0, error / standard, error * 1e12).max()))
    return worst


SAMPLED = [name for name in CASES if name != "custom"]


@pytest.mark.parametrize("case", SAMPLED)
def test_sampled_residuals_have_the_curvature_as_second_moment(case):
    likelihood, f, y = CASES[case]
    n = 40_000
    f, y = f[0], y[0]
    drawn = likelihood.part_sampled(
        f.expand(n, *f.shape), y.expand(n, *y.shape), generator=torch.Generator().manual_seed(3)
    )
    expected = torch.stack([S @ S.mT for S in likelihood.part_roots(f, y)])
    assert len(drawn) == len(expected)
    assert sampled_error(list(drawn), expected) < 5


@pytest.mark.parametrize("case", list(CASES))
def test_random_signs_of_the_root_have_the_curvature_as_second_moment(case):
    likelihood, f, y = CASES[case]
    n = 40_000
    f, y = f[0], y[0]
    drawn = likelihood.part_sketched(
        f.expand(n, *f.shape), y.expand(n, *y.shape), generator=torch.Generator().manual_seed(3)
    )
    expected = torch.stack([S @ S.mT for S in likelihood.part_roots(f, y)])
    assert len(drawn) == len(expected)
    assert sampled_error(list(drawn), expected) < 5


def test_random_signs_of_a_confident_softmax_lose_no_digits():
    """r = R z for p_0 = 1 − ε: entries are √ε-sized, and their square is Λ_00 = ε (1 − ε) to rounding."""
    f = torch.tensor([[30.0, 0.0]], dtype=torch.float32)
    (r,) = Categorical().part_sketched(f, torch.zeros(1, dtype=torch.long), generator=torch.Generator().manual_seed(0))
    exact = torch.softmax(f.double(), -1).prod()
    assert torch.allclose(r.double().square(), exact.expand(1, 2), rtol=1e-5)


def test_random_signs_vary_less_than_drawn_labels():
    """Relative spread of r_c² over draws for 50 classes: labels about 1/√p for each of them."""
    f = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).expand(4000, 50)
    y = torch.zeros(4000, dtype=torch.long)
    labels, signs = (
        draw(f, y, generator=torch.Generator().manual_seed(1))[0].square()
        for draw in (Categorical().part_sampled, Categorical().part_sketched)
    )
    spread = [r.std(0) / r.mean(0) for r in (signs, labels)]
    assert float(spread[0].max()) < 1 < 1.5 < float(spread[1].min())
    assert float(spread[1].median()) > 8 * float(spread[0].median())


def test_the_sampling_check_rejects_a_planted_bug():
    """Weights of the drawn instead of the observed label; noise not divided out; another exposure."""
    n, generator = 40_000, torch.Generator().manual_seed(3)

    def judge(name: str, wrong: Tensor) -> float:
        likelihood, f, y = CASES[name]
        return sampled_error([wrong], torch.stack([S @ S.mT for S in likelihood.part_roots(f[0], y[0])]))

    def drawn_residual(name: str) -> Tensor:
        likelihood, f, _ = CASES[name]
        f = f[0].expand(n, *f[0].shape)
        return likelihood.residual(f, likelihood.sample(f, generator=generator))

    for name in ("categorical-weighted", "gaussian", "poisson"):
        assert judge(name, drawn_residual(name)) > 5, name


@pytest.mark.parametrize("case", SAMPLED)
def test_samples_are_encoded_targets_with_the_right_mean(case):
    likelihood, f, _ = CASES[case]
    n = 20_000
    f = f[0].expand(n, *f[0].shape)
    y = likelihood.sample(f, generator=torch.Generator().manual_seed(4))
    unweighted = Categorical() if isinstance(likelihood, Categorical) else likelihood
    r = unweighted.residual(f, y)  # score: mean zero under the model
    assert float((r.mean(0).abs() / (r.std(0) / n**0.5)).max()) < 5


@pytest.mark.parametrize("case", SAMPLED)
def test_sampling_repeats_with_its_generator_and_leaves_the_global_one(case):
    likelihood, f, y = CASES[case]
    before = torch.get_rng_state()
    first, second = (likelihood.sample(f, generator=torch.Generator().manual_seed(9)) for _ in range(2))
    likelihood.part_sampled(f, y, generator=torch.Generator().manual_seed(9))
    assert torch.equal(first, second) and torch.equal(before, torch.get_rng_state())


# --- densities of others --------------------------------------------------------------------------------


def test_log_densities_agree_with_other_libraries():
    D = torch.distributions
    _, f, y = CASES["categorical"]
    exact(Categorical().log_prob(f, y), D.Categorical(logits=f).log_prob(y))
    _, f, y = CASES["bernoulli"]
    exact(Bernoulli().log_prob(f, y), D.Bernoulli(logits=f).log_prob(y.double()).sum(-1))
    likelihood, f, y = CASES["gaussian-per-output"]
    assert isinstance(likelihood, Gaussian)
    exact(likelihood.log_prob(f, y), D.Normal(f, likelihood.resolved()).log_prob(y).sum(-1))
    likelihood, f, y = CASES["poisson"]
    rate = (f + y[..., 1]).exp().numpy()
    exact(likelihood.log_prob(f, y), torch.tensor(stats.poisson.logpmf(y[..., 0].numpy(), rate)).sum(-1), atol=1e-11)
    for link in ("exp", "softplus"):
        likelihood, f, y = CASES[f"hetero-{link}"]
        assert isinstance(likelihood, HeteroscedasticGaussian)
        mean, variance = likelihood.natural_to_moments(f)
        exact(likelihood.log_prob(f, y), D.Normal(mean, variance.sqrt()).log_prob(y))


# --- categorical ----------------------------------------------------------------------------------------


def test_extreme_logits_stay_finite_and_right():
    f = torch.tensor([[1e4, 0.0, -1e4]], dtype=torch.float64)
    for label, expected in ((0, 0.0), (1, -1e4), (2, -2e4)):
        y, likelihood = torch.tensor([label]), Categorical()
        assert likelihood.log_prob(f, y).item() == expected
        assert torch.isfinite(likelihood.residual(f, y)).all() and torch.isfinite(likelihood.hessian_root(f, y)).all()
    b = torch.tensor([[1e4, -1e4]], dtype=torch.float64)
    assert Bernoulli().log_prob(b, torch.tensor([[1, 1]])).item() == -1e4
    assert Bernoulli().log_prob(b, torch.tensor([[1, 0]])).item() == 0
    assert torch.equal(Bernoulli().residual(b, torch.tensor([[0, 0]])), torch.tensor([[-1.0, 0.0]]).double())
    h = HeteroscedasticGaussian("softplus").log_prob(torch.tensor([[0.0, 1e4]]).double(), torch.zeros(1).double())
    exact(h, torch.tensor([0.5 * torch.log(torch.tensor(1e4 / (2 * pi), dtype=torch.float64))]).double())


def test_confident_terms_keep_their_digits_in_single_precision():
    f, y = torch.tensor([[40.0, 0.0, 1.0]]), torch.tensor([0])
    for likelihood, label in ((Categorical(), y), (Bernoulli(), torch.tensor([[1, 0, 1]]))):
        for verb in ("residual", "hessian", "hessian_root"):
            single = getattr(likelihood, verb)(f, label).double()
            assert_close(single, getattr(likelihood, verb)(f.double(), label), rtol=1e-5, atol=0)
    assert Categorical().hessian(f, y)[0, 0, 0] > 0  # 1 − p rounds to zero here


def test_softmax_is_invariant_to_a_common_shift_and_its_curvature_singular():
    likelihood, f, y = CASES["categorical"]
    exact(likelihood.log_prob(f + 7.0, y), likelihood.log_prob(f, y))
    ones = torch.ones(C, dtype=torch.float64)
    exact(likelihood.hessian(f, y) @ ones, torch.zeros(N, T, C).double())
    exact(ones @ likelihood.hessian_root(f, y), torch.zeros(N, T, C - 1).double())


def test_weights_multiply_and_ignored_terms_count_for_nothing():
    likelihood, f, y = CASES["categorical-weighted"]
    plain, w = Categorical(), torch.tensor([0.5, 2.0, 0.0]).double()
    kept = y != -100
    for verb in ("log_prob", "residual", "hessian"):
        weighted, unweighted = getattr(likelihood, verb)(f, y)[kept], getattr(plain, verb)(f, y)[kept]
        exact(weighted, w[y[kept]].reshape(-1, *[1] * (weighted.ndim - 1)) * unweighted)
    generator = torch.Generator().manual_seed(0)
    for part in ("log_prob", "residual", "hessian", "hessian_root"):
        assert not getattr(plain, part)(f, y)[~kept].any()
    assert not plain.part_sampled(f, y, generator=generator)[0][~kept].any()


def test_masked_logits_are_allowed():
    f = torch.tensor([[0.0, 1.0, -torch.inf]]).double()
    likelihood = Categorical()
    exact(likelihood.log_prob(f, torch.tensor([1])), Categorical().log_prob(f[:, :2], torch.tensor([1])))
    assert likelihood.log_prob(f, torch.tensor([-100])).item() == 0
    assert torch.isfinite(likelihood.hessian_root(f, torch.tensor([1]))).all()


# --- Gaussian -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_output", [False, True])
def test_unknown_noise_is_estimated_by_maximum_likelihood(per_output):
    f, y = normal(50, 1, C), normal(50, 1, C, seed=5)
    unknown = Gaussian(per_output=per_output)
    assert unknown.estimated and len(unknown.part_roots(f, y)) == len(unknown.part_residuals(f, y)) == (
        C if per_output else 1
    )
    statistics = unknown.statistics(f, y)
    known = unknown.estimate(statistics)
    assert known.estimated and known.per_output == per_output
    dims = (0, 1) if per_output else (0, 1, 2)
    exact(known.resolved(), (y - f).square().mean(dims).sqrt().reshape(-1))
    log_s = known.resolved().log().requires_grad_()
    (gradient,) = torch.autograd.grad(unknown.with_noise_std(log_s.exp()).log_lik(statistics), log_s)
    exact(gradient, torch.zeros_like(gradient), atol=1e-10)


@pytest.mark.parametrize("noise", [[0.7], [0.7, 0.2, 1.5]])
def test_gradients_in_the_noise(noise):
    f, y = normal(N, T, C), normal(N, T, C, seed=5)
    s = torch.tensor(noise, dtype=torch.float64, requires_grad=True)
    likelihood = Gaussian(s)
    direct = torch.autograd.grad(likelihood.log_prob(f, y).sum(), s)[0]
    exact(torch.autograd.grad(likelihood.log_lik(likelihood.statistics(f, y)), s)[0], direct)
    exact(torch.autograd.grad(likelihood.part_scales().sum(), s)[0], -2 / s.detach() ** 3)
    assert torch.autograd.gradcheck(lambda t: Gaussian(t).log_prob(f, y), s)


def test_unresolved_noise_is_refused_in_words():
    f, y, unknown = normal(N, C), normal(N, C), Gaussian()
    for call in (
        lambda: unknown.log_prob(f, y),
        lambda: unknown.hessian(f, y),
        unknown.part_scales,
        lambda: unknown.sample(f, generator=torch.Generator()),
        lambda: unknown.log_lik(unknown.statistics(f, y)),
    ):
        with pytest.raises(InputError, match="noise_std"):
            call()
    with pytest.raises(NumericalError, match="passes through every"):
        unknown.estimate(unknown.statistics(y, y))


def test_noise_keeps_its_meaning():
    assert Gaussian(0.3).resolved().shape == (1,) and Gaussian(0.3).resolved().dtype == torch.float64
    assert not Gaussian(0.3).estimated and not Gaussian(0.3).with_noise_std(0.5).estimated
    assert Gaussian([0.1, 0.2]).per_output and not Gaussian([0.1]).per_output
    with pytest.raises(ShapeError, match="fit again"):
        Gaussian([0.1, 0.2]).log_lik(Gaussian().statistics(normal(3, 2), normal(3, 2)))


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan"), float("inf"), [1.0, 0.0], [], [[1.0]]])
def test_bad_noise_is_refused(noise):
    with pytest.raises(InputError, match="noise_std"):
        Gaussian(noise)


# --- heteroscedastic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["exp", "softplus"])
def test_heteroscedastic_natural_parameter_identities(link):
    likelihood, f = HeteroscedasticGaussian(link), normal(7, 2).requires_grad_()
    y = normal(7, seed=5)
    h = f[:, 1].exp() if link == "exp" else torch.nn.functional.softplus(f[:, 1])
    eta1, eta2 = f[:, 0], -h / 2
    log_p = eta1 * y + eta2 * y**2 + eta1**2 / (4 * eta2) + 0.5 * (-2 * eta2).log() - 0.5 * log(2 * pi)
    exact(likelihood.log_prob(f, y), log_p)
    corner = 1 / (2 * eta2**2) - eta1**2 / (2 * eta2**3)
    off = eta1 / (2 * eta2**2)
    fisher_eta = torch.stack([torch.stack([-1 / (2 * eta2), off], -1), torch.stack([off, corner], -1)], -2)
    mean, variance = likelihood.natural_to_moments(f)
    exact(torch.linalg.det(fisher_eta), 2 * variance**3)
    exact(mean, -eta1 / (2 * eta2))
    (slope,) = torch.autograd.grad(eta2.sum(), f, retain_graph=True)
    D = torch.diag_embed(torch.stack([torch.ones(7).double(), slope[:, 1]], -1))
    exact(D @ fisher_eta @ D, likelihood.hessian(f, y))
    # (a) link in the network, J_η Λ_η J_η; (b) link in the likelihood, J_f Λ_f J_f, for a linear map f = J θ
    J = normal(7, 2, 5, seed=8)
    exact((D @ J).mT @ fisher_eta @ (D @ J), J.mT @ likelihood.hessian(f, y) @ J)


def test_softplus_link_far_into_its_tails():
    likelihood = HeteroscedasticGaussian("softplus")
    f2 = torch.tensor([-700.0, -50.0, -20.0001, -19.9999, 0.0, 19.9999, 20.0001, 300.0]).double().requires_grad_()
    log_h = likelihood._log_precision(f2)
    x = f2.detach()
    expected = torch.where(x < -30, x, torch.log1p(x.exp()).log())
    exact(log_h, expected)
    exact(torch.autograd.grad(log_h.sum(), f2)[0], likelihood._log_slope(x))


# --- custom ---------------------------------------------------------------------------------------------


def test_custom_is_the_built_in_one():
    _, f, y = CASES["custom"]
    built_in = Categorical()
    for log_prob in (softmax_term, lambda y, f: softmax_term(f, y), lambda a, b: softmax_term(y=b, f=a)):
        custom = CustomLikelihood(log_prob)
        for verb in ("log_prob", "residual", "hessian"):
            exact(getattr(custom, verb)(f, y), getattr(built_in, verb)(f, y))


def test_custom_takes_confident_terms_in_single_precision():
    f, y = 10 * normal(200, 5).float(), labels(200, high=5)
    S = CustomLikelihood(softmax_term).hessian_root(f, y)
    assert_close(S @ S.mT, Categorical().hessian(f, y), rtol=0, atol=1e-6)


def student(f: Tensor, y: Tensor) -> Tensor:
    return -2 * torch.log1p((y - f[0]) ** 2 / 3)


def test_custom_curvature_that_is_not_positive():
    f, y = torch.zeros(3, 1).double(), torch.tensor([0.0, 0.5, 5.0]).double()
    with pytest.raises(NumericalError, match=r"term \(2,\) has eigenvalue -0\.1"):
        CustomLikelihood(student).hessian(f, y)
    with pytest.raises(NumericalError, match="clip"):
        CustomLikelihood(student).hessian_root(f, y)
    clipped = CustomLikelihood(student, psd="clip")
    assert clipped.hessian(f, y)[2].item() == 0 and clipped.hessian(f, y)[0].item() > 0
    assert check_likelihood(clipped, f, y).hessian_error is None


def test_custom_fisher_by_sampling():
    def sample(f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.bernoulli(torch.sigmoid(f[..., 0]), generator=generator)

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        return y * f[0] - torch.nn.functional.softplus(f[0])

    custom = CustomLikelihood(log_prob, sample=sample, psd="fisher", n_fisher=1000)
    f, y = torch.tensor([[-1.0], [0.3], [2.0]]).double(), torch.zeros(3).double()
    assert_close(custom.hessian(f, y), Bernoulli().hessian(f, y), rtol=0.2, atol=0)
    exact(custom.hessian(f, y), custom.hessian(f, y))
    with pytest.raises(InputError, match="sampler"):
        CustomLikelihood(log_prob, psd="fisher")


def test_custom_says_what_is_missing_or_wrong():
    f, y = normal(3, 2), normal(3)
    with pytest.raises(ShapeError, match="scalar"):
        CustomLikelihood(lambda f, y: y * f).log_prob(f, y)
    with pytest.raises(InputError, match="sample="):
        CustomLikelihood(softmax_term).sample(f, generator=torch.Generator())
    with pytest.raises(InputError, match="mean="):
        CustomLikelihood(softmax_term).mean(f)
    for bad in (dict(psd="maybe"), dict(n_fisher=0), dict(class_axis=0)):
        with pytest.raises(InputError):
            CustomLikelihood(softmax_term, **bad)
    with pytest.raises(InputError, match="function"):
        CustomLikelihood(3)


def test_custom_with_vector_targets():
    custom = CustomLikelihood(lambda f, y: -0.5 * (y - f).square().sum(), mean=lambda f: f)
    y = normal(N, T, 2)
    encoded = custom.encode(y, Sites((T, 2)), N)
    exact(custom.residual(normal(N, T, 2, seed=2), encoded), y - normal(N, T, 2, seed=2))


# --- check_likelihood finds mistakes ----------------------------------------------------------------------


class WrongResidual(Bernoulli):
    def residual(self, f: Tensor, y: Tensor) -> Tensor:
        return -super().residual(f, y)


class WrongHessian(Categorical):
    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed(torch.softmax(f, -1))


class WrongRoot(HeteroscedasticGaussian):
    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        return super().hessian_root(f, y).mT


class WrongFisher(HeteroscedasticGaussian):
    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        return 2 * super().hessian(f, y)

    def hessian_root(self, f: Tensor, y: Tensor) -> Tensor:
        return 2**0.5 * super().hessian_root(f, y)


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "what"),
    [
        (WrongResidual(), normal(4, 2), labels(4, 2, high=2), "residual"),
        (WrongHessian(), normal(4, 3), labels(4), "hessian"),
        (WrongRoot(), normal(4, 2), normal(4), "hessian_root"),
        (WrongFisher(), normal(4, 2), normal(4), "hessian does not match"),
    ],
)
def test_check_likelihood_finds(likelihood, f, y, what):
    with pytest.raises(NumericalError, match=what):
        check_likelihood(likelihood, f, y)


# --- targets ----------------------------------------------------------------------------------------------

Y1, Y2 = torch.tensor([0, 2, 1, 0]), torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]])

ACCEPTED = {
    # likelihood, targets, datum shape, shape of the encoding
    "labels": (Categorical(), Y1, (3,), (4, 1)),
    "labels-list": (Categorical(), [0, 2, 1, 0], (3,), (4, 1)),
    "labels-array": (Categorical(), Y1.numpy(), (3,), (4, 1)),
    "labels-uint8": (Categorical(), Y1.to(torch.uint8), (3,), (4, 1)),
    "labels-column": (Categorical(), Y1[:, None], (3,), (4, 1)),
    "labels-ignored": (Categorical(), torch.tensor([0, -100, 1, 2]), (3,), (4, 1)),
    "labels-sequence": (Categorical(), Y2, (2, 5), (4, 2)),
    "labels-image": (Categorical(class_axis=1), torch.zeros(4, 6, 7).long(), (5, 6, 7), (4, 42)),
    "binary": (Bernoulli(), Y2[:, 0], (), (4, 1, 1)),
    "binary-column": (Bernoulli(), Y2[:, :1].bool(), (), (4, 1, 1)),
    "binary-flat": (Bernoulli(), Y2[:, 0].double(), (1,), (4, 1, 1)),
    "multilabel": (Bernoulli(), Y2, (2,), (4, 1, 2)),
    "real": (Gaussian(), normal(4), (1,), (4, 1, 1)),
    "real-column": (Gaussian(), normal(4, 1), (), (4, 1, 1)),
    "real-ints": (Gaussian([1.0, 2.0]), Y2, (2,), (4, 1, 2)),
    "counts": (Poisson(), Y2, (2,), (4, 1, 2, 2)),
    "counts-flat": (Poisson(), Y1.float(), (1,), (4, 1, 1, 2)),
    "counts-exposure": (Poisson(), (Y1, torch.ones(4)), (1,), (4, 1, 1, 2)),
    "counts-exposure-list": (Poisson(), [Y1, torch.ones(4)], (1,), (4, 1, 1, 2)),
    "hetero": (HeteroscedasticGaussian(), normal(4), (2,), (4, 1)),
    "hetero-column": (HeteroscedasticGaussian(), normal(4, 1), (2,), (4, 1)),
    "custom": (CustomLikelihood(softmax_term), Y1, (3,), (4, 1)),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_targets_are_accepted(case):
    likelihood, y, datum_shape, shape = ACCEPTED[case]
    sites = Sites(datum_shape, likelihood.class_axis)
    encoded = likelihood.encode(y, sites, 4)
    assert tuple(encoded.shape) == shape
    if isinstance(likelihood, Gaussian):
        likelihood = Gaussian(1.0)
    assert likelihood.log_prob(normal(4, sites.t, sites.c), encoded).shape == (4, sites.t)


REFUSED = {
    # likelihood, targets, datum shape, error, words of the message
    "float labels": (Categorical(), Y1.float(), (3,), InputTypeError, "long"),
    "bool labels": (Categorical(), Y1.bool(), (3,), InputTypeError, "long"),
    "one-hot": (Categorical(), torch.eye(4)[:, :3], (3,), ShapeError, "argmax"),
    "one-hot ints": (Categorical(), torch.eye(4).long()[:, :3], (3,), ShapeError, "argmax"),
    "label too large": (Categorical(), Y1 + 1, (3,), InputError, "label .1,. is 3"),
    "label negative": (Categorical(), Y1 - 1, (3,), InputError, "is -1"),
    "one logit": (Categorical(), Y1, (1,), ShapeError, "Bernoulli"),
    "no class axis": (Categorical(), Y1, (), ShapeError, "Bernoulli"),
    "too few labels": (Categorical(), Y1[:3], (3,), ShapeError, "never broadcast"),
    "one label for all": (Categorical(), Y1[:1], (3,), ShapeError, "never broadcast"),
    "labels per site": (Categorical(), Y1, (2, 3), ShapeError, r"\(4, 2\)"),
    "weights": (Categorical(weight=[1.0, 2.0]), Y1, (3,), ShapeError, "one weight per class"),
    "strings": (Categorical(), ["cat", "dog"], (3,), InputTypeError, "Convert"),
    "complex": (Gaussian(), torch.ones(4) * 1j, (), InputTypeError, "real"),
    "soft labels": (Bernoulli(), torch.full((4,), 0.5), (), InputError, "0 or 1"),
    "signed labels": (Bernoulli(), 2 * Y2 - 1, (2,), InputError, "0 or 1"),
    "nan labels": (Bernoulli(), torch.full((4,), torch.nan), (), InputError, "nan"),
    "labels for two logits": (Bernoulli(), Y2[:, 0], (2,), ShapeError, "Categorical"),
    "broadcast row": (Gaussian(), normal(1, 2), (2,), ShapeError, "never broadcast"),
    "broadcast column": (Gaussian(), normal(4, 1), (2,), ShapeError, "never broadcast"),
    "flat for two": (Gaussian(), normal(4), (2,), ShapeError, r"\(4, 2\)"),
    "outer": (Gaussian(), normal(4, 4), (1,), ShapeError, r"\(4, 1\)"),
    "nan": (Gaussian(), torch.tensor([0, 1, torch.nan, 2]), (), InputError, r"target \(2,\) is nan"),
    "infinite": (Gaussian(), torch.tensor([0, 1, torch.inf, 2]), (), InputError, "finite"),
    "noise count": (Gaussian([1.0, 2.0]), normal(4, 3), (3,), ShapeError, "2 came"),
    "noise per output": (Gaussian(1.0, per_output=True), normal(4, 3), (3,), ShapeError, "per_output"),
    "negative count": (Poisson(), Y1 - 1, (), InputError, "counts"),
    "fractional count": (Poisson(), Y1 + 0.5, (), InputError, "counts"),
    "infinite count": (Poisson(), torch.full((4,), torch.inf), (), InputError, "finite"),
    "zero exposure": (Poisson(), (Y1, torch.zeros(4)), (), InputError, "positive exposures"),
    "exposure shape": (Poisson(), (Y1, torch.ones(1)), (), ShapeError, "one exposure per count"),
    "hetero outputs": (HeteroscedasticGaussian(), normal(4), (3,), ShapeError, "2 outputs"),
    "hetero targets": (HeteroscedasticGaussian(), normal(4, 2), (2,), ShapeError, "one target per pair"),
    "hetero nan": (HeteroscedasticGaussian(), torch.full((4,), torch.nan), (2,), InputError, "finite"),
    "custom shape": (CustomLikelihood(softmax_term), Y1[:2], (3,), ShapeError, "one entry per term"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_targets_are_refused(case):
    likelihood, y, datum_shape, error, words = REFUSED[case]
    with pytest.raises(error, match=words) as caught:
        likelihood.encode(y, Sites(datum_shape, likelihood.class_axis), 4)
    assert isinstance(caught.value, LapwingError)


def test_targets_land_on_their_sites():
    y = torch.arange(4 * 6 * 7).reshape(4, 6, 7) % 5
    sites = Sites((5, 6, 7), class_axis=1)
    assert torch.equal(Categorical(class_axis=1).encode(y, sites, 4), y.reshape(4, 42))
    y = normal(4, 5, 6)
    sites = Sites((5, 6), class_axis=1)
    assert torch.equal(Gaussian(class_axis=1).encode(y, sites, 4), y.mT)
    counts, log_exposure = Poisson().encode((Y2, 1.0 + Y2), Sites((2,)), 4).unbind(-1)
    assert torch.equal(counts[:, 0], Y2.double())
    exact(log_exposure[:, 0].exp(), 1 + Y2.double())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Categorical(weight=[1.0, -1.0]),
        lambda: Categorical(weight=[1.0, float("nan")]),
        lambda: Categorical(weight=torch.ones(2, 2)),
        lambda: Poisson(exposure=0.0),
        lambda: Poisson(exposure=float("nan")),
        lambda: HeteroscedasticGaussian("square"),
        lambda: Bernoulli(class_axis=0),
    ],
)
def test_bad_options_are_refused(make):
    with pytest.raises(InputError):
        make()


def test_likelihoods_are_values():
    assert Categorical(weight=torch.tensor([1.0, 2.0])) == Categorical(weight=[1.0, 2.0])
    assert hash(Bernoulli()) == hash(Bernoulli())
    for likelihood, _, _ in CASES.values():
        with pytest.raises(AttributeError):
            likelihood.class_axis = 1
