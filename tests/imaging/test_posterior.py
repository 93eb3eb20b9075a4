"""The posterior of an image against dense matrices, in float64, on 8 × 8 images."""

from __future__ import annotations

from math import log, pi

import pytest
import torch

import imaging_oracle as oracle
import lapwing as lw
from lapwing.imaging.distances import class_grams, taps
from lapwing.imaging.evidence import Evidence, maximise
from lapwing.imaging.linear_image import LinearImage
from lapwing.imaging.planning import sized
from lapwing.imaging.predcp import BlockVariation

N = 8


@pytest.fixture(scope="module")
def r() -> lw.imaging.Reconstruction:
    A = lw.imaging.radon(N, 4)
    at = torch.arange(N, dtype=torch.float64) - 3.5
    truth = ((at[:, None] ** 2 + at**2) < 7).double() * 0.8
    noise = torch.randn(A.data_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    network = lw.imaging.UNet((3, 4), skips=1, seed=1).double()
    return lw.imaging.reconstruct(
        A, A(truth) + 0.1 * noise, network=network, steps=150, tv=1e-3, lr=3e-3, progress=False
    )


@pytest.fixture(scope="module")
def post(r: lw.imaging.Reconstruction) -> lw.imaging.ImagingPosterior:
    return lw.imaging.posterior(r, progress=False)


def dense(r: lw.imaging.Reconstruction, post: lw.imaging.ImagingPosterior) -> tuple[torch.Tensor, ...]:
    """x̂, A J, J, S_θ and y_o by the oracle."""
    x, J, theta = oracle.jacobian(r.network, r.input)
    values = dict(post.hyperparameters)
    if "variance" in values:
        S = values["variance"] * torch.eye(len(theta), dtype=torch.float64)
    else:
        S = oracle.prior_covariance(r.network, oracle.blocks(r.network), values)
    A = r.operator.matrix()
    target = r.data.flatten() - A @ (x - J @ theta)
    return x, A, J, S, target


@pytest.mark.parametrize("options", [{}, {"prior": "one"}, {"mode": "network"}, {"tv_prior": True}], ids=str)
def test_covariance_is_that_of_weight_space(r: lw.imaging.Reconstruction, options: dict) -> None:
    post = lw.imaging.posterior(r, progress=False, **options)
    x, A, J, S, _ = dense(r, post)
    truth = oracle.posterior(A, J, S, post.noise_std**2)
    torch.testing.assert_close(post.mean.flatten(), x)
    torch.testing.assert_close(post.covariance(), truth, rtol=1e-8, atol=1e-8 * float(truth.diagonal().max()))
    torch.testing.assert_close(post.std.flatten() ** 2, truth.diagonal(), rtol=1e-8, atol=1e-10)


def test_evidence_at_the_linear_mode_is_the_gaussian_density(r, post) -> None:
    _, A, J, S, target = dense(r, post)
    K = A @ J @ S @ J.T @ A.T + post.noise_std**2 * torch.eye(len(A), dtype=torch.float64)
    torch.testing.assert_close(post.log_evidence(), oracle.log_normal(target, K), rtol=1e-9, atol=1e-8)


def test_evidence_at_the_networks_weights(r) -> None:
    post = lw.imaging.posterior(r, mode="network", progress=False)
    x, A, J, S, _ = dense(r, post)
    theta = oracle.jacobian(r.network, r.input)[2]
    K = A @ J @ S @ J.T @ A.T + post.noise_std**2 * torch.eye(len(A), dtype=torch.float64)
    residual = r.data.flatten() - A @ x
    F = 0.5 * (torch.slogdet(K)[1] + residual @ residual / post.noise_std**2 + theta @ torch.linalg.inv(S) @ theta)
    torch.testing.assert_close(post.log_evidence(), -F - 0.5 * len(A) * log(2 * pi), rtol=1e-8, atol=1e-8)


def test_the_mode_explains_the_quadratic_form(r, post) -> None:
    """y_oᵀK⁻¹y_o = ‖y_o − A J θ_m‖²/σ² + θ_mᵀS_θ⁻¹θ_m, so the bound at any other weights is above F."""
    _, A, J, S, target = dense(r, post)
    K = A @ J @ S @ J.T @ A.T + post.noise_std**2 * torch.eye(len(A), dtype=torch.float64)
    theta = S @ J.T @ A.T @ torch.linalg.solve(K, target)
    residual = target - A @ J @ theta
    both = residual @ residual / post.noise_std**2 + theta @ torch.linalg.solve(S, theta)
    torch.testing.assert_close(both, target @ torch.linalg.solve(K, target), rtol=1e-8, atol=1e-8)


def evidence_of(r: lw.imaging.Reconstruction, post: lw.imaging.ImagingPosterior, *, tv: bool = False) -> Evidence:
    model = _model(r, post)
    return model.evidence(post.inserted, model.variation("consistent") if tv else None)


def _model(r: lw.imaging.Reconstruction, post: lw.imaging.ImagingPosterior) -> LinearImage:
    sizes = sized(N * N, r.operator.linear.m, post.prior.p, post.prior.classes[-1].stop, 8, 1 << 30)
    return LinearImage.of(r, post.prior, sizes, False)


@pytest.mark.parametrize("options", [{}, {"prior": "one"}, {"mode": "network"}, {"tv_prior": True}], ids=str)
def test_the_optimum_beats_its_neighbours(r, options: dict) -> None:
    post = lw.imaging.posterior(r, progress=False, **options)
    evidence = evidence_of(r, post, tv="tv_prior" in options)
    log_noise = torch.tensor(post.noise_std, dtype=torch.float64).log() * 2
    best = evidence.loss(post.eta, log_noise)
    low, high = post.prior.bounds
    for k in range(len(post.eta) + 1):
        for step in (-0.1, 0.1):
            moved, noise = post.eta.clone(), log_noise
            if k < len(post.eta):
                moved[k] = (moved[k] + step).clamp(low[k], high[k])
            else:
                noise = log_noise + step
            assert evidence.loss(moved, noise) >= best - 1e-4


def test_gradient_of_the_objective(r, post) -> None:
    evidence = evidence_of(r, post, tv=True)
    eta = (post.prior.start(0.05, 0.7) + 0.1 * torch.arange(len(post.eta)).double().cos()).requires_grad_()
    noise = torch.tensor(-4.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(evidence.loss, (eta, noise), eps=1e-6, rtol=1e-5, atol=1e-6)


def test_interval_and_log_density(r, post) -> None:
    low, high = post.interval(0.95)
    torch.testing.assert_close((high - low) / 2, 1.959963984540054 * post.std)
    image = post.sample(1, generator=torch.Generator().manual_seed(3))[0]
    corrected = post.corrected()
    cov = corrected.covariance()
    torch.testing.assert_close(cov, post.covariance() + post.correction * torch.eye(N * N, dtype=torch.float64))
    d = (image - post.mean).flatten()
    torch.testing.assert_close(corrected.log_prob(image), oracle.log_normal(d, cov), rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("side", [1, 2, 3, 5, 8])
def test_patch_scores(post, side: int) -> None:
    """Against one patch at a time; 3 and 5 leave a rest that the last patches cover."""
    q = post.corrected()
    image = q.sample(1, generator=torch.Generator().manual_seed(4))[0]
    truth = oracle.patch_score((image - q.mean).flatten(), q.covariance(), (N, N), side)
    assert float(q.log_prob(image, patch=side)) == pytest.approx(truth, rel=1e-9)
    if side == N:
        assert float(q.log_prob(image)) == pytest.approx(truth, rel=1e-9)


def test_halved_covariances(post) -> None:
    q = post.corrected()
    image = q.sample(1)[0]
    cov = q.covariance()
    halved = 0.5 * cov + 0.5 * torch.diag(cov.diagonal())
    truth = oracle.patch_score((image - q.mean).flatten(), halved, (N, N), 4)
    assert float(q.log_prob(image, patch=4, halved=True)) == pytest.approx(truth, rel=1e-9)


def test_image_noise_correction(r, post) -> None:
    values = torch.linalg.svdvals(r.operator.matrix())[:100]
    values = values[values > 1e-7 * values[0]]
    assert post.correction == pytest.approx(float(post.noise_std**2 * (1 / values**2).sum() / (N * N)), rel=1e-6)


@pytest.mark.parametrize("kernel", [(3, 3), (), (2, 2), (5, 5), (1, 3), (3,), (2, 3)])
def test_distance_classes(kernel: tuple[int, ...]) -> None:
    grid = taps(kernel)
    J = torch.randn(5, 4, grid.classes.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = torch.einsum("afk,rkl,bfl->rab", J, grid.classes, J)
    torch.testing.assert_close(class_grams(J, kernel), truth, rtol=1e-12, atol=1e-12)
    assert len(grid.distances) == len({round(float(r), 9) for r in grid.distances})
    assert int(grid.classes.sum()) == grid.classes.shape[1] ** 2


def test_assembly_from_distance_classes(r, post) -> None:
    _, A, J, _, _ = dense(r, post)
    eta = post.prior.start(0.3, 0.8)
    S = oracle.prior_covariance(r.network, oracle.blocks(r.network), post.prior.described(eta))
    evidence = evidence_of(r, post)
    K = evidence.covariance(eta, torch.tensor(-3.0, dtype=torch.float64))
    truth = A @ J @ S @ J.T @ A.T + torch.tensor(-3.0).double().exp() * torch.eye(len(A), dtype=torch.float64)
    torch.testing.assert_close(K, truth, rtol=1e-11, atol=1e-12)


def _variation(r, post) -> tuple[BlockVariation, torch.Tensor, str]:
    model = _model(r, post)
    block = model.variation("consistent").blocks[0]
    J = oracle.jacobian(r.network, r.input)[1]
    return block, J, block.name


def test_expected_total_variation(r, post) -> None:
    """Against numerical integration over every difference; its derivative against finite differences."""
    block, J, name = _variation(r, post)
    v, length = torch.tensor(0.4).double(), torch.tensor(0.9).double()
    names = oracle.blocks(r.network)
    kinds = {"variance": 1e-300, "length_scale": 1.0}
    values = {f"{b}.{kind}": least for b in set(names.values()) for kind, least in kinds.items()}
    values |= {f"{name}.variance": 0.4, f"{name}.length_scale": 0.9}
    cov = J @ oracle.prior_covariance(r.network, names, values) @ J.T
    assert float(block.kappa(v.log(), length.log())) == pytest.approx(oracle.kappa(post.mean, cov), rel=1e-7)
    h = 1e-5
    up, down = (block.kappa(v.log(), length.log() + s) for s in (h, -h))
    assert float(block.slope(v.log(), length.log())) == pytest.approx(float((up - down) / (2 * h)), rel=1e-7)


def test_expected_total_variation_of_no_variance_is_that_of_the_image(r, post) -> None:
    block = _variation(r, post)[0]
    tiny = torch.tensor(-40.0, dtype=torch.float64)
    found = float(block.kappa(tiny, torch.zeros((), dtype=torch.float64)))
    assert found == pytest.approx(float(lw.imaging.total_variation(post.mean)), rel=1e-6)


def test_more_angles_shrink_every_variance(r, post) -> None:
    _, A, J, S, _ = dense(r, post)
    few = oracle.posterior(A[: len(A) // 2], J, S, post.noise_std**2).diagonal()
    assert bool((post.std.flatten() ** 2 <= few + 1e-12).all())


def test_hyperparameters_may_be_given(r) -> None:
    values = {"variance": 0.3}
    post = lw.imaging.posterior(r, prior="one", hyperparameters=values, noise_std=0.2, progress=False)
    assert dict(post.hyperparameters) == pytest.approx(values) and post.noise_std == 0.2
    only = lw.imaging.posterior(r, prior="one", hyperparameters=values, progress=False)
    assert dict(only.hyperparameters) == pytest.approx(values)
    assert only.log_evidence() > post.log_evidence()


def test_the_evidence_as_a_function(r, post) -> None:
    curve = lw.imaging.evidence(r, progress=False)
    assert set(curve.names) == set(post.hyperparameters)
    best = curve(post.hyperparameters, post.noise_std)
    torch.testing.assert_close(best, post.log_evidence(), rtol=1e-9, atol=1e-8)
    assert curve(post.hyperparameters, 2 * post.noise_std) < best
    with pytest.raises(lw.InputError):
        curve({"variance": 1.0}, 0.1)


def test_g_prior(r) -> None:
    post = lw.imaging.posterior(r, prior="g", progress=False)
    _, J, _ = oracle.jacobian(r.network, r.input)
    A = r.operator.matrix()
    scale = 1 / (A @ J).square().mean(0).sqrt().clamp(min=1e-6)
    S = torch.diag(post.hyperparameters["variance"] * scale**2)
    truth = oracle.posterior(A, J, S, post.noise_std**2)
    torch.testing.assert_close(post.covariance(), truth, rtol=1e-6, atol=1e-8 * float(truth.diagonal().max()))


def test_refitted_mode_is_below_the_linear_modes_evidence(r, post, monkeypatch) -> None:
    monkeypatch.setattr("lapwing.imaging.refit._STEPS", 40)
    refit = lw.imaging.posterior(
        r, mode="refit_tv", hyperparameters=post.hyperparameters, noise_std=post.noise_std, progress=False
    )
    assert refit.log_evidence() <= post.log_evidence() + 1e-8


def test_one_dense_layer_is_bayesian_linear_regression() -> None:
    """A = I and an image that is linear in the weights: the textbook's posterior and noise."""
    features = torch.randn(36, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    network = _Linear(features)
    A = lw.imaging.Operator(torch.eye(36, dtype=torch.float64), 6)
    w = torch.linspace(-1, 1, 5, dtype=torch.float64)
    y = features @ w + 0.3 * torch.randn(36, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    r = lw.imaging.reconstruct(A, y, network=network, input=torch.ones(1, 1).double(), tv=0.0, steps=5, progress=False)
    post = lw.imaging.posterior(r, prior="one", progress=False)
    v, s = post.hyperparameters["variance"], post.noise_std**2
    H = features.T @ features / s + torch.eye(5, dtype=torch.float64) / v
    torch.testing.assert_close(post.covariance(), features @ torch.linalg.inv(H) @ features.T, rtol=1e-7, atol=1e-10)
    K = v * features @ features.T + s * torch.eye(36, dtype=torch.float64)
    torch.testing.assert_close(post.log_evidence(), oracle.log_normal(y, K), rtol=1e-8, atol=1e-8)


class _Linear(torch.nn.Module):
    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("features", features)
        self.weight = torch.nn.Parameter(torch.zeros(1, 5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight @ self.features.T).reshape(len(x), 6, 6)


def test_the_evidence_search_recovers_the_noise() -> None:
    """On data drawn from the linear model itself."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 60, dtype=torch.float64, generator=generator)
    from lapwing.imaging.blocks import one_block
    from lapwing.imaging.prior import ImagePrior
    from lapwing.network.parameters import ParamLayout

    prior = ImagePrior("one", one_block(ParamLayout(("w",), ((60, 1),))), 60)
    w = 0.5 * torch.randn(60, dtype=torch.float64, generator=generator)
    y = rows @ w + 0.7 * torch.randn(300, dtype=torch.float64, generator=generator)
    found = maximise(Evidence(prior, prior.grams(rows), y))
    assert found.noise_var**0.5 == pytest.approx(0.7, rel=0.15)
    assert float(found.eta.exp()) == pytest.approx(0.25, rel=0.5)


@pytest.mark.parametrize("prior", ["blocks", "one", "g"])
def test_data_without_noise(prior: str) -> None:
    """Nothing bounds the noise from below but rounding: the search must not fall over."""
    A = lw.imaging.blur(N, 0.8)
    network = lw.imaging.UNet((3, 4), skips=1, seed=1)
    r = lw.imaging.reconstruct(A, A(torch.eye(N)), network=network, steps=20, tv=1e-4, progress=False)
    post = lw.imaging.posterior(r, prior=prior, progress=False)
    assert 0 < post.noise_std < 1 and bool(torch.isfinite(post.std).all())
