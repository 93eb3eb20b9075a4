"""The studies of posteriors that are trained, at a size that proves nothing but that they run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lapwing_studies.reproduce import marglik, published, variational
from lapwing_studies.reproduce.effort import TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study
from lapwing_studies.reproduce.variational_networks import preact_resnet18, small_cnn
from study_pages import written

pytestmark = pytest.mark.filterwarnings("ignore:.*stopping then would cut")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(DataFolder(None), Store(tmp_path), TOY, 1)


@pytest.mark.slow
def test_variational_laplace_fills_its_page(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(variational, "BETAS", (0.1, 1.0))
    monkeypatch.setattr(variational, "MULTIPLIERS", (1.0, 10.0))
    record = variational.run(study)
    assert {run["method"] for run in record["runs"]} == {"MAP", "VI", "VL"} and len(record["runs"]) == 8
    text = written("variational-laplace", record, tmp_path)
    assert len(text) > 10_000


@pytest.mark.slow
def test_marglik_fills_its_page(study: Study, tmp_path: Path):
    record = marglik.run(study)
    assert [run["network"] for run in record["runs"]] == ["MLP", "CNN"] and len(record["sines"]) == 1
    text = written("marglik", record, tmp_path)
    assert len(text) > 10_000


def test_the_networks_take_the_images():
    x = torch.randn(2, 3, 32, 32)
    for make in (small_cnn, preact_resnet18, *marglik.NETWORKS.values()):
        assert make(3, 32, 10)(x).shape == (2, 10)
    assert sum(p.numel() for p in preact_resnet18(3, 32, 10).parameters()) == pytest.approx(11.17e6, rel=0.01)


def test_published_numbers_are_the_tables():
    assert published.VARIATIONAL_LAPLACE["cifar100"]["VI 10 draws"] == (1.49, 67.3, 0.026)
    assert published.VARIATIONAL_SECONDS["VL"] / published.VARIATIONAL_SECONDS["MAP"] == pytest.approx(2.75, abs=0.01)
    assert published.MARGLIK_2021["cifar10", "ResNet"]["evidence"] == (86.11, -0.595)
