"""Deep image priors: the loss, the best so far, interruption, what is left of the user's things, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.imaging.descent import Descent
from lapwing.imaging.total_variation import NoiseModel, automatic, edges

N = 10


def problem(level: float = 0.05) -> tuple[lw.imaging.Operator, torch.Tensor, torch.Tensor]:
    A = lw.imaging.radon(N, 6)
    truth = torch.zeros(N, N)
    truth[3:7, 2:6] = 0.9
    noise = torch.randn(A.data_shape, generator=torch.Generator().manual_seed(0))
    return A, truth, A(truth) + level * A(truth).abs().mean() * noise


def small(**options: Any) -> lw.imaging.UNet:
    return lw.imaging.UNet((4, 6), skips=2, **options)


def run(A: lw.imaging.Operator, y: torch.Tensor, **options: Any) -> lw.imaging.Reconstruction:
    return lw.imaging.reconstruct(A, y, **{"network": small(), "steps": 40, "tv": 1e-4, "progress": False, **options})


def test_total_variation() -> None:
    image = torch.tensor([[0.0, 1.0, 3.0], [0.0, -1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    total = lw.imaging.total_variation(image)
    assert float(total.detach()) == 1 + 2 + 1 + 4 + 0 + 2 + 0
    first, second = edges(2, 3)
    flat = image.detach().flatten()
    assert float((flat[first] - flat[second]).abs().sum()) == float(total.detach())
    (g,) = torch.autograd.grad(total, image)
    signs = torch.zeros(6, dtype=torch.float64)  # the divergence of the signs of the differences
    s = torch.sign(flat[first] - flat[second])
    signs.index_add_(0, first, s).index_add_(0, second, -s)
    torch.testing.assert_close(g.flatten(), signs)


def test_it_reconstructs() -> None:
    A, truth, y = problem()
    r = run(A, y, steps=500, lr=3e-3, truth=truth)
    assert r.psnr(truth) > float(lw.imaging.psnr(A.fbp(y), truth)) + 3
    assert r.image.shape == (N, N) and r.input.shape == (1, 1, N, N)
    torch.testing.assert_close(r.input[0, 0], A.fbp(y))
    torch.testing.assert_close(r.network(r.input)[0, 0], r.image)
    assert not r.network.training and r.history[-1].psnr == pytest.approx(r.psnr(truth), abs=2.0)


def test_the_best_parameters_are_kept() -> None:
    A, _, y = problem()
    r = run(A, y, steps=30, lr=0.3)
    losses = [step.loss for step in r.history]
    final = (A(r.image) - y).square().mean() + 1e-4 * lw.imaging.total_variation(r.image)
    assert float(final) <= min(losses) * (1 + 1e-5)


def test_the_users_things_are_untouched() -> None:
    A, _, y = problem()
    network, z = small(), torch.rand(1, 1, N, N)
    before = [p.detach().clone() for p in network.parameters()], z.clone(), y.clone(), torch.get_rng_state()
    r = run(A, y, network=network, input=z)
    lw.imaging.posterior(r, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(before[0], network.parameters(), strict=True))
    assert all(p.grad is None for p in network.parameters()) and network.training
    assert torch.equal(before[1], z) and torch.equal(before[2], y) and torch.equal(before[3], torch.get_rng_state())


def test_the_same_bits_every_time() -> None:
    A, _, y = problem()
    one, two = run(A, y), run(A, y)
    assert torch.equal(one.image, two.image)
    assert torch.equal(lw.imaging.UNet(4).out.weight, lw.imaging.UNet(4).out.weight)


class _Killed(Exception):
    pass


@pytest.mark.parametrize("dropout", [False, True])
def test_a_killed_reconstruction_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: bool
) -> None:
    A, truth, y = problem()
    network = nn.Sequential(small(), nn.Dropout(0.1)) if dropout else small()
    options: dict[str, Any] = {"network": network, "truth": truth, "held_out": 0.1}
    whole = run(A, y, **options)
    plain = Descent.advance

    def dies(self: Descent, *, record: bool) -> Any:
        if self.step == 23:
            raise _Killed
        return plain(self, record=record)

    monkeypatch.setattr(Descent, "advance", dies)
    with pytest.raises(_Killed):
        run(A, y, checkpoint=tmp_path, every=0, **options)
    monkeypatch.setattr(Descent, "advance", plain)
    with pytest.raises(lw.StorageError, match="tv"):
        run(A, y, checkpoint=tmp_path, every=0, **{**options, "tv": 2e-4})
    steps: list[int] = []
    monkeypatch.setattr(Descent, "advance", lambda self, *, record: (steps.append(1), plain(self, record=record))[1])
    resumed = run(A, y, checkpoint=tmp_path, **options)
    assert len(steps) <= 40 - 22
    assert torch.equal(resumed.image, whole.image) and resumed.history == whole.history
    assert not list(tmp_path.iterdir())


def test_early_stopping_on_held_out_measurements() -> None:
    A, _, y = problem(0.5)
    r = run(A, y, held_out=0.2, steps=600, lr=1e-2, tv=0.0)
    assert r.history[-1].step < 600 and r.history[0].held_out is not None
    assert min(step.held_out for step in r.history) >= 0


def test_networks_of_all_kinds() -> None:
    A, _, y = problem()
    flat = nn.Sequential(nn.Flatten(), nn.Linear(N * N, N * N), nn.Unflatten(1, (N, N)))
    norm = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    for network in (flat, norm, small(norm="group", sigmoid=False), lw.imaging.UNet(3, 1)):
        r = run(A, y, network=network, steps=10)
        post = lw.imaging.posterior(r, prior="one", progress=False)
        assert post.std.shape == (N, N) and bool(torch.isfinite(post.std).all())
        torch.testing.assert_close(post.mean.float(), r.image, rtol=1e-4, atol=1e-4)


def test_running_statistics_are_those_of_the_input() -> None:
    A, _, y = problem()
    norm = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1))
    r = run(A, y, network=norm, steps=20)
    torch.testing.assert_close(r.network.train()(r.input)[0, 0], r.image, rtol=0.05, atol=0.02)


def test_unet_sizes() -> None:
    net = lw.imaging.UNet(32, 3, (4, 4))
    assert sum(p.numel() for p in net.parameters() if p.ndim == 4) == 76_608
    assert sum(p.numel() for p in net.parameters()) == 76_905
    assert len(net.prior_blocks()) == 8
    for h, w in ((28, 28), (9, 13), (5, 6)):
        assert net(torch.zeros(1, 1, h, w)).shape == (1, 1, h, w)
    names = [n for names in lw.imaging.UNet(4, 4, (0, 2, 0), norm="group").prior_blocks().values() for n in names]
    assert sorted(names) == sorted(n for n, p in lw.imaging.UNet(4, 4, (0, 2, 0)).named_parameters() if p.ndim == 4)


@pytest.mark.statistical
def test_noise_is_estimated_from_the_data() -> None:
    A, truth = lw.imaging.radon(24, 15), torch.zeros(24, 24, dtype=torch.float64)
    truth[6:18, 9:15] = 1.0
    for sigma in (0.05, 0.2, 0.8):
        noise = torch.randn(A.data_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        assert NoiseModel(A, A(truth) + sigma * noise).noise_std == pytest.approx(sigma, rel=0.35)


def test_automatic_total_variation_is_near_the_published_weights() -> None:
    """Of an image of strokes with the mean projection of the published ones."""
    image = torch.zeros(28, 28, dtype=torch.float64)
    image[4:24, 8:12] = image[10:13, 4:24] = image[20:23, 6:22] = 1.0
    published = {5: 1e-5, 10: 3e-5, 20: 1e-4, 30: 1e-4}
    for angles, gamma in published.items():
        A = lw.imaging.radon(28, angles)
        sigma = float(0.05 * A(image).abs().mean())
        found, _ = automatic(A, A(image), sigma)
        assert 0.2 < found / gamma < 5


def test_automatic_scales_with_the_noise() -> None:
    A, _, y = problem()
    low, high = automatic(A, y, 0.1)[0], automatic(A, y, 0.2)[0]
    assert high == pytest.approx(4 * low)
    assert run(A, y, tv="auto", steps=3).noise_std > 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tv": -1.0}, lw.InputError, "zero or positive"),
        ({"tv": "much"}, lw.InputError, "auto"),
        ({"tv": float("nan")}, lw.InputError, "zero or positive"),
        ({"steps": 0}, lw.InputError, "steps"),
        ({"steps": 1.5}, lw.InputTypeError, "steps"),
        ({"lr": 0.0}, lw.InputError, "lr"),
        ({"held_out": 0.9}, lw.InputError, "held_out"),
        ({"truth": torch.zeros(3, 3)}, lw.ShapeError, "truth"),
        ({"noise_std": -1.0}, lw.InputError, "noise_std"),
        ({"network": lambda z: z}, lw.InputTypeError, "nn.Module"),
        ({"network": nn.Conv2d(1, 2, 1)}, lw.ShapeError, "output has shape"),
        ({"network": nn.Conv2d(3, 1, 1)}, lw.ShapeError, "raised"),
        ({"network": nn.Identity()}, lw.InputError, "no parameter"),
        ({"input": torch.full((1, 1, N, N), torch.nan)}, lw.InputError, "input"),
        ({"y": torch.zeros(6, 3)}, lw.ShapeError, "data have shape"),
        ({"y": torch.full((6, 15), torch.nan)}, lw.InputError, "NaN"),
        ({"A": torch.eye(3)}, lw.InputTypeError, "operator"),
        ({"generator": 3}, lw.InputTypeError, "generator"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], says: str) -> None:
    A, _, y = problem()
    given = {"A": A, "y": y, **options}
    with pytest.raises(error, match=says):
        run(given.pop("A"), given.pop("y"), **given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prior": "two"}, "prior"),
        ({"mode": "mean"}, "mode"),
        ({"tv_prior": True}, "tv > 0"),
        ({"prior": "one", "tv_prior": True}, "blocks"),
        ({"noise_std": 0.0}, "noise_std"),
        ({"hyperparameters": {"v": 1.0}}, "hyperparameters"),
        ({"blocks": {"a": ["nothing"]}}, "no trainable"),
        ({"blocks": {"a": ["inc.0.weight"]}}, "in no block"),
        ({"memory": "1KB"}, "fits"),
    ],
)
def test_bad_posterior(options: dict[str, Any], says: str) -> None:
    A, _, y = problem()
    r = run(A, y, steps=2, tv=0.0)
    with pytest.raises(lw.LapwingError, match=says):
        lw.imaging.posterior(r, progress=False, **options)


def test_bad_questions() -> None:
    A, _, y = problem()
    post = lw.imaging.posterior(run(A, y, steps=2), prior="one", progress=False)
    for call in (
        lambda: post.interval(1.0),
        lambda: post.sample(0),
        lambda: post.log_prob(torch.zeros(3, 3)),
        lambda: post.log_prob(torch.full((N, N), torch.nan)),
        lambda: post.log_prob(torch.zeros(N, N), patch=99),
        lambda: lw.imaging.posterior(y),
        lambda: lw.imaging.plan(y),
        lambda: lw.imaging.plan(A, prior="two"),
        lambda: lw.imaging.Effort(n_samples=0),
        lambda: lw.imaging.Effort(rtol=2.0),
        lambda: lw.imaging.UNet(0),
        lambda: lw.imaging.UNet(4, 3, (1, 2, 3)),
        lambda: lw.imaging.UNet(4, norm="batch"),
    ):
        with pytest.raises(lw.LapwingError):
            call()
    with pytest.raises(lw.LapwingError):
        lw.imaging.posterior(run(A, y, steps=2, network=_Shift()), progress=False)


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def test_numpy_data_and_nonsquare_images() -> None:
    matrix = np.random.default_rng(0).normal(size=(20, 48))
    A = lw.imaging.Operator(matrix, (6, 8))
    r = lw.imaging.reconstruct(A, np.ones(20), network=small(), steps=3, tv=1e-4, progress=False)
    post = lw.imaging.posterior(r, progress=False)
    assert post.mean.shape == (6, 8) and post.sample(2).shape == (2, 6, 8) and post.covariance().shape == (48, 48)
    torch.testing.assert_close(r.input[0, 0].double(), A.adjoint(np.ones(20)), rtol=1e-5, atol=1e-5)
