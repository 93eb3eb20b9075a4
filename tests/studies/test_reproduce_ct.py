"""The CT study: its scores against loops, its page at toy size, and its tiers."""

from __future__ import annotations

import json
from math import log, pi
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lapwing as lw
from lapwing.cli.app import app
from lapwing_studies.reproduce import ct
from lapwing_studies.reproduce.ct_methods import BANDWIDTH, deterministic, dropout, ssim, with_dropout
from lapwing_studies.reproduce.effort import TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.phantoms import walnut_like
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study
from study_pages import written


def _random(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_ssim_is_the_mean_over_windows() -> None:
    x, y = _random(9, 10), _random(9, 20)[:, 10:]
    spread, values = float(y.max() - y.min()), []
    for i in range(3):
        for j in range(4):
            a, b = x[i : i + 7, j : j + 7].flatten(), y[i : i + 7, j : j + 7].flatten()
            c1, c2 = (0.01 * spread) ** 2, (0.03 * spread) ** 2
            cov = ((a - a.mean()) * (b - b.mean())).sum() / 48
            top = (2 * a.mean() * b.mean() + c1) * (2 * cov + c2)
            values.append(float(top / ((a.mean() ** 2 + b.mean() ** 2 + c1) * (a.var() + b.var() + c2))))
    assert ssim(x, y) == pytest.approx(float(np.mean(values)), rel=1e-9)
    assert ssim(y, y) == pytest.approx(1.0)


def test_scores_of_a_gaussian() -> None:
    truth, mean = _random(8, 8), 0.9 * _random(8, 8)
    normal = torch.distributions.Normal(mean, 0.2)
    assert deterministic(mean, 0.04, truth, 0.1).full == pytest.approx(float(normal.log_prob(truth).sum()))


def test_scores_of_passes_with_dropout() -> None:
    truth = _random(8, 8)
    draws = truth + 0.1 * torch.randn(300, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = dropout(draws, 0.01, truth, seed=0)
    mean, var = draws.mean(0), draws.var(0, correction=0) + 0.01
    assert found.pixels == pytest.approx(float(torch.distributions.Normal(mean, var.sqrt()).log_prob(truth).sum()))
    noise = torch.randn(draws.shape, dtype=draws.dtype, generator=torch.Generator().manual_seed(0))
    kernels = -0.5 * ((draws + 0.1 * noise - truth) / BANDWIDTH).square().sum((1, 2))
    density = torch.logsumexp(kernels, 0) - log(300) - 32 * log(2 * pi * BANDWIDTH**2)
    assert found.full == pytest.approx(float(density))


def test_dropout_is_behind_every_3x3_convolution() -> None:
    torch.manual_seed(0)
    network = with_dropout(lw.imaging.UNet(4, 3))
    assert sum(isinstance(m, torch.nn.Dropout2d) for m in network.modules()) == 9
    image = torch.rand(1, 1, 28, 28)
    assert torch.equal(network.eval()(image), network(image))
    # Few channels, of which a pass often drops none: among twenty passes some differ.
    first, *others = [network.train()(image) for _ in range(20)]
    assert not all(torch.equal(first, other) for other in others)


def test_the_phantom_is_an_image() -> None:
    image = walnut_like(64)
    assert image.shape == (64, 64) and float(image.min()) >= 0 and float(image.max()) <= 1
    assert torch.equal(image, walnut_like(64))


def test_noise_is_a_share_of_the_mean_projection() -> None:
    scan = ct.Scan.of(_random(28, 28), 10, 0.05, 1)
    assert scan.sigma == pytest.approx(0.05 * float(scan.A(scan.truth).abs().mean()))
    assert float((scan.y - scan.A(scan.truth)).std()) == pytest.approx(scan.sigma, rel=0.15)
    assert scan.A.data_shape == (10, 41)


def _folder(path: Path) -> Path:
    image = np.zeros((3, 28, 28), dtype=np.uint8)
    image[:, 6:22, 10:16] = 220
    np.savez(path / "ct_images.npz", kmnist_test=image)
    return path


@pytest.mark.slow
def test_the_page_can_be_made_and_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(DataFolder(_folder(tmp_path)), Store(tmp_path / "out"), TOY, n_seeds=1)
    record = ct.run(study)
    with monkeypatch.context() as patched:
        patched.setattr(lw.imaging, "reconstruct", None)  # what is done is not done again
        assert ct.run(study) == record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    text = written("ct", record, tmp_path)
    assert text.count('role="img"') == 8 + 2 + 1 + 3
    assert [row["method"] for row in record["runs"][0]["rows"]][:3] == ["DIP (σ² = 1)", "DIP (MLL σ²)", "DIP-MCDO"]


@pytest.mark.parametrize(
    "words", [["ct", "--tier", "huge"], ["step", "--tier", "faithful"], ["ct", "--tier", "faithful", "--quick"]]
)
def test_tiers_are_checked(words: list[str]) -> None:
    found = CliRunner().invoke(app, ["reproduce", *words])
    assert found.exit_code == 1 and "--tier" in found.output


def test_every_tier_has_its_settings() -> None:
    assert len(ct.TIERS["full"].settings) == 8 and ct.TIERS["faithful"].n_images == 50
    assert all(setting in ct.PUBLISHED for tier in ct.TIERS.values() for setting in tier.settings)


def test_the_benchmark_of_images_is_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases run on a small scan; no clock is asserted about."""
    from lapwing_studies.bench import imaging

    small = imaging.scanned(12, 4, 3)
    monkeypatch.setattr(imaging, "scanned", lambda *_: small)
    for name in ("evidence-again", "samples"):
        row = imaging.measure(name)
        assert row["ratio"] is not None and row["ratio"] > 0 and row["goal"] == imaging.CASES[name].goal
        json.dumps(row, allow_nan=False)
    assert [row["case"] for row in imaging.merged([row], [{**row, "note": "again"}])] == ["samples"]


def test_claims_are_decided_by_the_numbers() -> None:
    from lapwing_studies.reproduce.ct_claims import claims

    def record(mll: float, dropout_: float, coverage: float) -> dict:
        rows = [
            {"method": method, "full": full, "coverage": coverage, "correlation": 0.5}
            for method, full in (("linearised, MLL", mll), ("DIP-MCDO", dropout_), ("DIP (MLL σ²)", 0.0))
        ]
        rows.append({**rows[0], "method": "linearised, MLL + TV-PredCP"})
        return {"tier": {"n_images": 1}, "runs": [{"angles": 5, "level": 0.05, "rows": rows}]}

    assert [c.holds for c in claims(record(2.0, 1.0, 0.95))] == [True] * 5 + [None]
    assert [c.holds for c in claims(record(2.0, 3.0, 0.7))] == [False, True, True, True, False, None]
