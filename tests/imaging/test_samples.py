"""Samples, and the matrix-free way against the dense one."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch

import imaging_oracle as oracle
import lapwing as lw
from lapwing.imaging.sampled import SampledWay
from lapwing.imaging.ways import matheron

N = 8


@pytest.fixture(scope="module")
def r() -> lw.imaging.Reconstruction:
    A = lw.imaging.radon(N, 4)
    truth = torch.zeros(N, N, dtype=torch.float64)
    truth[2:6, 3:6] = 0.8
    y = A(truth) + 0.1 * torch.randn(A.data_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    network = lw.imaging.UNet((3, 4), skips=1, seed=1).double()
    return lw.imaging.reconstruct(A, y, network=network, steps=150, tv=1e-3, lr=3e-3, progress=False)


@pytest.fixture(scope="module")
def post(r: lw.imaging.Reconstruction) -> lw.imaging.ImagingPosterior:
    return lw.imaging.posterior(r, progress=False)


def test_matherons_rule_has_the_posterior_covariance(post: lw.imaging.ImagingPosterior) -> None:
    """Fed with roots instead of draws, its second moment is the covariance: no statistics. A wrong sign fails."""
    way = post.way
    d, m = len(way.S), way.A.linear.m
    gain = torch.cholesky_solve(way.cross, way.root)
    zeros_x, zeros_e = torch.zeros(m, d, dtype=torch.float64), torch.zeros(d, m, dtype=torch.float64)
    R = way._prior_root.T  # rows: R Rᵀ = S
    noise = sqrt(way.noise_var) * torch.eye(m, dtype=torch.float64)

    def moment(sign: float) -> torch.Tensor:
        by_prior = matheron(R, zeros_e, sign * way.A.linear(R), gain)
        by_noise = matheron(zeros_x, noise, torch.zeros(m, m, dtype=torch.float64), gain)
        return by_prior.T @ by_prior + by_noise.T @ by_noise

    scale = float(post.covariance().diagonal().max())
    torch.testing.assert_close(moment(1.0), post.covariance(), rtol=1e-7, atol=1e-8 * scale)
    assert (moment(-1.0) - post.covariance()).abs().max() > 0.1 * scale


@pytest.mark.statistical
def test_covariance_of_samples(post: lw.imaging.ImagingPosterior) -> None:
    """The error falls as 1/√n; a tenth too wide is seen."""
    cov = post.covariance()
    errors = []
    for n in (500, 8000):
        x = (post.sample(n, generator=torch.Generator().manual_seed(1)) - post.mean).reshape(n, -1)
        errors.append(float((x.T @ x / n - cov).norm() / cov.norm()))
    assert errors[1] < 0.45 * errors[0]
    alive = cov.diagonal() > 1e-8
    scaled = x[:, alive] / cov.diagonal()[alive].sqrt()
    whitened = torch.linalg.solve(torch.linalg.cholesky(_correlation(cov, alive)), scaled.T)
    mean = float(whitened.square().mean())
    assert abs(mean - 1) < 4 * sqrt(2 / whitened.numel())
    assert abs(1.21 * mean - 1) > 4 * sqrt(2 / whitened.numel())


def _correlation(cov: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    root = cov.diagonal()[alive].rsqrt()
    return root[:, None] * cov[alive][:, alive] * root


def test_samples_are_reproducible(post: lw.imaging.ImagingPosterior) -> None:
    a, b = (post.sample(4, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(post.sample(2), post.sample(2)) and a.shape == (4, N, N)
    corrected = post.corrected().sample(2000) - post.mean
    wider = corrected.square().mean() - (post.sample(2000) - post.mean).square().mean()
    assert float(wider) == pytest.approx(post.correction, rel=0.2)


def matrix_free(r: lw.imaging.Reconstruction, post: lw.imaging.ImagingPosterior, *, rows: bool) -> SampledWay:
    free = lw.imaging.posterior(
        r, hyperparameters=post.hyperparameters, noise_std=post.noise_std, way="matrixfree", progress=False,
        effort=lw.imaging.Effort(n_samples=400, rtol=1e-10),
    ).way  # fmt: skip
    return free if rows else replace(free, rows=None)


def test_products_are_those_of_the_matrix(r, post) -> None:
    free, dense = matrix_free(r, post, rows=False), post.way
    m = r.operator.linear.m
    K = free.K(torch.eye(m, dtype=torch.float64))
    torch.testing.assert_close(K, dense.root @ dense.root.T, rtol=1e-9, atol=1e-11)
    b = torch.randn(3, m, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = torch.cholesky_solve(b.T, dense.root).T
    torch.testing.assert_close(matrix_free(r, post, rows=True).solve(b), exact, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(free.solve(b), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


def test_the_same_draws_in_both_solvers(r, post) -> None:
    a = matrix_free(r, post, rows=True).sample(5, torch.Generator().manual_seed(2))
    b = matrix_free(r, post, rows=False).sample(5, torch.Generator().manual_seed(2))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.statistical
@pytest.mark.parametrize("rows", [True, False])
def test_standard_deviations_agree_within_the_stated_error(r, post, rows: bool) -> None:
    free = matrix_free(r, post, rows=rows)
    alive = post.std.flatten() > 1e-4
    ratio = (free.variance().sqrt() / post.std.flatten())[alive]
    stated = 1 / sqrt(2 * free.effort.n_samples)
    assert float((ratio - 1).square().mean().sqrt()) < 1.5 * stated
    assert "samples" in free.accuracy()


def test_log_evidence_by_lanczos(r, post) -> None:
    free = matrix_free(r, post, rows=False)
    log_det, quad = free.log_det_and_quad(post.inserted.target)
    truth = post.way.log_det_and_quad(post.inserted.target)
    assert float(quad) == pytest.approx(float(truth[1]), rel=1e-6)
    assert float(log_det) == pytest.approx(float(truth[0]), abs=0.1 * abs(float(truth[0])) + 3)
    exact = matrix_free(r, post, rows=True).log_det_and_quad(post.inserted.target)
    assert float(exact[0]) == pytest.approx(float(truth[0]), rel=1e-9)


def test_hyperparameters_of_both_ways_agree(r) -> None:
    """With all rows of A J the evidence is the same."""
    dense = lw.imaging.posterior(r, prior="one", progress=False)
    free = lw.imaging.posterior(r, prior="one", way="matrixfree", progress=False)
    assert free.noise_std == pytest.approx(dense.noise_std, rel=1e-4)
    assert free.hyperparameters["variance"] == pytest.approx(dense.hyperparameters["variance"], rel=1e-3)


def test_what_samples_cannot_say_is_refused(r, post) -> None:
    free = lw.imaging.posterior(r, way="matrixfree", effort=lw.imaging.Effort(n_samples=20), progress=False)
    with pytest.raises(lw.StructureError, match="samples"):
        free.covariance()
    with pytest.raises(lw.StructureError, match="patch"):
        free.log_prob(post.mean, patch=N)
    assert torch.isfinite(free.corrected().log_prob(post.mean, patch=2, halved=True))
    assert "samples" in str(free.diagnose())


def test_tv_prior_matrix_free(r) -> None:
    dense = lw.imaging.posterior(r, tv_prior=True, progress=False)
    free = lw.imaging.posterior(r, tv_prior=True, way="matrixfree", progress=False)
    assert free.found.loss == pytest.approx(dense.found.loss, rel=1e-6)


def test_plans() -> None:
    kmnist = lw.imaging.plan(lw.imaging.radon(28, 20), memory="4GB")
    assert kmnist.way == "dense" and kmnist.n_weights == 76_608 and kmnist.n_measurements == 820
    assert kmnist.n_evidence == 820 and "dense" in repr(kmnist) and kmnist.record()["way"] == "dense"
    large = lw.imaging.plan(lw.imaging.radon(128, 10, 90), memory="4GB")
    assert large.way == "matrixfree"
    small = lw.imaging.plan(lw.imaging.radon(28, 20), memory="180MB")
    assert small.way == "matrixfree" and small.n_evidence < 820 and small.matrixfree_bytes <= 180e6


def test_the_walnut_on_paper() -> None:
    """501 × 501 pixels, 7,680 measurements, about three million weights: samples within four gigabytes."""
    network = lw.imaging.UNet(128, 6, (4, 4, 0, 0, 0), norm="group", sigmoid=False)
    A = lw.imaging.Operator(
        image_shape=(501, 501),
        forward=lambda x: x.reshape(-1)[:7680],
        adjoint=lambda y: torch.nn.functional.pad(y.reshape(-1), (0, 251_001 - 7680)).reshape(501, 501),
    )
    plan = lw.imaging.plan(A, network, memory="4GB")
    assert plan.way == "matrixfree" and plan.dense_bytes > 1e12 and plan.matrixfree_bytes < 4e9


def test_a_part_of_the_measurements_is_enough_for_the_evidence(r) -> None:
    part = lw.imaging.posterior(r, prior="one", memory="2MB", way="matrixfree", progress=False)
    whole = lw.imaging.posterior(r, prior="one", progress=False)
    assert 0.3 < part.hyperparameters["variance"] / whole.hyperparameters["variance"] < 3


def _normal(n: int) -> torch.Tensor:
    return torch.randn(n, N * N, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


@pytest.mark.statistical
def test_kappa_by_draws(r, post) -> None:
    """The closed form against draws of the image, within four standard errors."""
    cov = post.way.S
    draws = post.mean + (_normal(20_000) @ torch.linalg.cholesky(
        cov + 1e-12 * torch.eye(N * N)).T).reshape(-1, N, N)  # fmt: skip
    tv = lw.imaging.total_variation(draws)
    truth = oracle.kappa(post.mean, cov)
    assert abs(float(tv.mean()) - truth) < 4 * float(tv.std()) / 20_000**0.5
