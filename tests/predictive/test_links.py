"""Link integrals against worked values, quadrature, and the limits that theory gives."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from torch import Tensor
from torch.testing import assert_close

from lapwing.errors import InputError, NumericalError
from lapwing.predictive import links

M = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
V = torch.tensor([[1.0, 0.2, 0.0], [0.2, 0.5, 0.1], [0.0, 0.1, 2.0]], dtype=torch.float64)


def close(a: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    assert_close(a, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def random_gaussians(b: int, c: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    m = 2 * torch.randn(b, c, dtype=torch.float64, generator=g)
    A = torch.randn(b, c, c, dtype=torch.float64, generator=g)
    return m, A @ A.mT / c + 0.1 * torch.eye(c, dtype=torch.float64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hermite_cube(n: int = 60) -> tuple[Tensor, Tensor]:
    """All n³ nodes of the product rule for N(M, V), and their weights."""
    x, w = links.gauss_hermite(n)
    eps = torch.cartesian_prod(x, x, x)
    return M + eps @ torch.linalg.cholesky(V).T, torch.cartesian_prod(w, w, w).prod(-1)


# --- worked values ----------------------------------------------------------------------------------------


def test_worked_values_of_the_closed_forms():
    close(links.probit(M, V.diagonal()), [0.613010, 0.262700, 0.124290])
    close(links.pairwise_log_scores(M, V).exp(), [0.591195, 0.263801, 0.144054])
    close(links.pairwise(M, V), [0.591757, 0.264052, 0.144191])
    close(links.bridge_alpha(M, V), [2.416044, 2.289461, 0.541284])
    close(links.bridge(M, V), [0.460481, 0.436355, 0.103165])
    close(links.bridge_norm_alpha(M, V), [2.138525, 1.389555, 0.270504])
    close(links.bridge_norm(M, V), [0.562979, 0.365809, 0.071212])


def test_worked_values_of_the_exact_integral():
    f, w = hermite_cube()
    p = torch.softmax(f, -1)
    mean = w @ p
    close(mean, [0.596955, 0.250248, 0.152797])
    close(w @ (p - mean).square(), [0.048891, 0.025643, 0.031272])
    close(w @ (p - p.square()), [0.191709, 0.161981, 0.098178])
    close(torch.softmax(M, -1), [0.665241, 0.244728, 0.090031])
    drawn = torch.softmax(links.gaussian_draws(M, V, 2**14, generator=generator()), -1)
    close(links.monte_carlo(drawn.log()), [0.596955, 0.250248, 0.152797], atol=2e-4)
    close(drawn.var(0, unbiased=False), [0.048891, 0.025643, 0.031272], atol=2e-4)


def test_worked_values_of_one_logit():
    m, v = torch.tensor(1.0, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    assert abs(links.sigmoid_quadrature(m, v).item() - 0.647726) < 1e-6
    assert abs(links.expect(torch.sigmoid, m, v).item() - 0.647726) < 1e-6
    assert abs(links.sigmoid_probit(m, v).item() - 0.651056) < 1e-6


# --- one logit --------------------------------------------------------------------------------------------


def integral(function, m: float, v: float) -> float:
    """Adaptive quadrature, split where the Gaussian or the sigmoid bends."""
    s = v**0.5
    bends = {
        float(np.clip(t, m - 12 * s, m + 12 * s))
        for t in [*np.linspace(-40, 40, 33), *(m + s * np.linspace(-12, 12, 25))]
    }
    edges = sorted(bends)
    density = lambda f: function(f) * np.exp(-0.5 * ((f - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))  # noqa: E731
    return sum(quad(density, a, b, epsabs=1e-14, epsrel=1e-11)[0] for a, b in pairwise(edges))


def entropy_np(f: float) -> float:
    return float(np.log1p(np.exp(-abs(f))) + abs(f) * expit(-abs(f)))


def entropy(f: Tensor) -> Tensor:
    return torch.log1p((-f.abs()).exp()) + f.abs() * torch.sigmoid(-f.abs())


@pytest.mark.parametrize("v", [1e-4, 0.5, 4.0, 50.0, 1e4])
def test_panel_quadrature_is_right_at_every_variance(v):
    ms = [0.0, 0.3, -2.0, 9.0, -30.0]
    m = torch.tensor(ms, dtype=torch.float64)
    var = torch.full_like(m, v)
    expected = torch.tensor([integral(expit, x, v) for x in ms], dtype=torch.float64)
    assert_close(links.sigmoid_quadrature(m, var), expected, rtol=1e-9, atol=0)
    assert_close(links.log_sigmoid_quadrature(m, var), expected.log(), rtol=1e-9, atol=1e-9)
    expected = torch.tensor([integral(entropy_np, x, v) for x in ms], dtype=torch.float64)
    assert_close(links.expect_logistic(entropy, m, var), expected, rtol=1e-7, atol=1e-10)


def test_gauss_hermite_is_not_enough_for_wide_logits():
    """Why there are two rules: 64 Hermite nodes step over the sigmoid at a deviation of 100."""
    m, v = torch.tensor(5.0, dtype=torch.float64), torch.tensor(1e4, dtype=torch.float64)
    truth = integral(expit, 5.0, 1e4)
    assert abs(links.expect(torch.sigmoid, m, v).item() - truth) > 1e-2
    assert abs(links.sigmoid_quadrature(m, v).item() - truth) < 1e-12


@pytest.mark.parametrize(("v", "bound"), [(1.0, 0.0046), (4.0, 0.0101), (10.0, 0.0135), (50.0, 0.0166)])
def test_error_of_the_binary_probit(v, bound):
    m = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    error = (
        (links.sigmoid_probit(m, torch.full_like(m, v)) - links.sigmoid_quadrature(m, torch.full_like(m, v)))
        .abs()
        .max()
    )
    assert abs(error - bound) < 6e-5 and error < 0.017


def test_one_logit_limits():
    m = torch.tensor([-1e4, -3.0, 0.0, 2.0, 1e4], dtype=torch.float64)
    zero = torch.zeros_like(m)
    assert_close(links.sigmoid_quadrature(m, zero), torch.sigmoid(m))
    assert_close(links.log_sigmoid_quadrature(m, zero), torch.nn.functional.logsigmoid(m))
    v = torch.full_like(m, 3.0)
    both = links.sigmoid_quadrature(m, v) + links.sigmoid_quadrature(-m, v)
    assert_close(both, torch.ones_like(m), rtol=0, atol=1e-14)
    assert links.sigmoid_quadrature(m.float(), v.float()).dtype == torch.float32
    assert_close(
        links.sigmoid_quadrature(m.float(), v.float()).double(), links.sigmoid_quadrature(m, v), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("n", [1, 2, 5, 32, 64])
def test_gauss_hermite_moments(n):
    x, w = links.gauss_hermite(n)
    reference_x, reference_w = np.polynomial.hermite_e.hermegauss(n)
    assert_close(x, torch.tensor(reference_x), rtol=0, atol=1e-12)
    assert_close(w, torch.tensor(reference_w / reference_w.sum()), rtol=1e-9, atol=0)
    assert abs(w.sum().item() - 1) < 1e-14
    for degree, moment in ((2, 1.0), (4, 3.0), (6, 15.0)):
        if degree <= 2 * n - 1:
            assert abs((w * x**degree).sum().item() - moment) < 1e-11


def test_expect_gives_the_moments_of_a_log_normal():
    m, v = torch.tensor([0.2, -1.0], dtype=torch.float64), torch.tensor([0.3, 0.8], dtype=torch.float64)
    assert_close(links.expect(torch.exp, m, v, 32), (m + v / 2).exp(), rtol=1e-12, atol=0)
    both = links.expect(lambda f: torch.stack([f, f.square()], -1), m, v, 8)
    assert_close(both, torch.stack([m, m.square() + v], -1), rtol=1e-12, atol=1e-12)


# --- classes ----------------------------------------------------------------------------------------------


def test_two_classes_reduce_to_one_logit():
    m, cov = random_gaussians(20, 2)
    gap, gap_var = m[:, 0] - m[:, 1], cov[:, 0, 0] + cov[:, 1, 1] - 2 * cov[:, 0, 1]
    assert_close(links.pairwise(m, cov)[:, 0], links.sigmoid_probit(gap, gap_var), rtol=1e-12, atol=1e-12)
    drawn = links.monte_carlo(links.gaussian_draws(m, cov, 4096, generator=generator()))
    assert_close(drawn[:, 0], links.sigmoid_quadrature(gap, gap_var), rtol=0, atol=1e-3)


@pytest.mark.parametrize("link", [links.pairwise, links.bridge, links.bridge_norm])
@pytest.mark.parametrize("c", [2, 3, 10])
def test_probabilities_are_probabilities_and_commute_with_relabelling(link, c):
    m, cov = random_gaussians(7, c)
    p = link(m, cov)
    assert (p >= 0).all()
    assert_close(p.sum(-1), torch.ones(7, dtype=torch.float64))
    order = torch.randperm(c, generator=generator())
    assert_close(link(m[:, order], cov[:, order][:, :, order]), p[:, order], rtol=1e-10, atol=1e-12)
    assert_close(link(m[3], cov[3]), p[3], rtol=1e-12, atol=1e-12)


def test_shift_invariance():
    m, cov = random_gaussians(7, 4)
    assert_close(links.pairwise(m + 5, cov), links.pairwise(m, cov), rtol=0, atol=1e-12)
    var = cov.diagonal(dim1=-2, dim2=-1)
    assert (links.probit(m + 5, var) - links.probit(m, var)).abs().max() > 1e-3
    a, b = (links.gaussian_draws(m + shift, cov, 64, generator=generator()) for shift in (0.0, 5.0))
    assert_close(links.monte_carlo(a), links.monte_carlo(b), rtol=0, atol=1e-12)


def test_no_variance_gives_the_plain_softmax():
    m, _ = random_gaussians(5, 4)
    cov = torch.zeros(5, 4, 4, dtype=torch.float64)
    p = torch.softmax(m, -1)
    draws = links.gaussian_draws(m, cov, 10, generator=generator())
    for q in (links.pairwise(m, cov), links.probit(m, torch.zeros_like(m)), links.monte_carlo(draws)):
        assert_close(q, p, rtol=0, atol=1e-14)


def test_bridge_far_from_comfort():
    m = torch.tensor([900.0, 0.0, -900.0], dtype=torch.float64)
    p = links.bridge(m, V)
    assert torch.isfinite(p).all() and p[0] > 0.999
    with pytest.raises(NumericalError, match="log α"):
        links.bridge_alpha(m, V)
    assert_close(links.bridge(M, 1e-30 * V), links.bridge(M, V), rtol=1e-9, atol=0)  # 1/V cancels in the mean
    for cov in (torch.zeros_like(V), torch.ones_like(V)):
        with pytest.raises(NumericalError, match="pairwise"):
            links.bridge(M, cov)


def test_bridge_when_the_sum_is_already_fixed():
    centre = torch.eye(3, dtype=torch.float64) - 1 / 3
    cov = centre @ V @ centre
    assert_close(links.bridge_alpha(M + 2, cov), links.bridge_alpha(M, cov + 1e-9), rtol=1e-6, atol=0)


# --- draws ------------------------------------------------------------------------------------------------


def test_draws_have_the_right_moments():
    draws = links.gaussian_draws(M, V, 2**13, generator=generator())
    assert draws.shape == (2**13, 3)
    assert_close(draws.mean(0), M, rtol=0, atol=2e-3)
    assert_close(draws.T.cov(), V, rtol=0, atol=2e-2)  # a variance passed as a deviation would be off by 0.2 and 2


def test_draws_are_a_pure_function_of_the_generator():
    m, cov = random_gaussians(6, 3)
    before = torch.get_rng_state()
    all_at_once = links.gaussian_draws(m, cov, 100, generator=generator(3))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(all_at_once, links.gaussian_draws(m, cov, 100, generator=generator(3)))
    one_by_one = [links.gaussian_draws(m[i : i + 1], cov[i : i + 1], 100, generator=generator(3)) for i in range(6)]
    assert_close(torch.cat(one_by_one, 1), all_at_once, rtol=1e-13, atol=1e-13)
    g = generator(3)
    first, second = (links.gaussian_draws(m, cov, 100, generator=g) for _ in range(2))
    assert not torch.equal(first, second)
    grid = links.gaussian_draws(m.reshape(2, 3, 3), cov.reshape(2, 3, 3, 3), 100, generator=generator(3))
    assert_close(grid.flatten(1, 2), all_at_once, rtol=1e-13, atol=1e-13)


def test_singular_covariances_have_roots_and_negative_ones_do_not():
    m, cov = random_gaussians(4, 3)
    root = cov[0, :, :2]
    cov = torch.stack([cov[1], root @ root.T, torch.zeros(3, 3).double(), torch.ones(3, 3).double()])
    R = links.covariance_root(cov)
    assert_close(R @ R.mT, cov, rtol=1e-12, atol=1e-12)
    rounded = cov[1] - 1e-15 * torch.eye(3, dtype=torch.float64)
    assert torch.isfinite(links.gaussian_draws(m[0], rounded, 16, generator=generator())).all()
    with pytest.raises(NumericalError, match="eigenvalues from"):
        links.covariance_root(cov[1] - 0.1 * torch.eye(3, dtype=torch.float64))
    with pytest.raises(InputError, match="1 or more"):
        links.gaussian_draws(m[0], cov[0], 0, generator=generator())


def test_points_are_finite_and_normal():
    eps = torch.cat([links.sobol_normal(256, 20, generator=generator(seed)) for seed in range(40)])
    assert torch.isfinite(eps).all()
    assert abs(eps.mean().item()) < 1e-3 and abs(eps.var().item() - 1) < 1e-2
    assert links.sobol_normal(1, 5, generator=generator()).shape == (1, 5)


@pytest.mark.parametrize("c", [3, 10])
def test_sobol_draws_beat_independent_ones(c):
    m, cov = random_gaussians(20, c)
    truth = links.monte_carlo(links.gaussian_draws(m, cov, 2**15, generator=generator(99)))
    L = torch.linalg.cholesky(cov)

    def rmse(draw) -> float:
        return float(
            torch.stack([(links.monte_carlo(draw(seed)) - truth).square().mean() for seed in range(10)]).mean().sqrt()
        )

    def independent(seed: int) -> Tensor:
        eps = torch.randn(1000, c, dtype=torch.float64, generator=generator(seed))
        return m + torch.einsum("bij,nj->nbi", L, eps)

    sobol = rmse(lambda seed: links.gaussian_draws(m, cov, 1000, generator=generator(seed)))
    assert sobol < rmse(independent) / 5
