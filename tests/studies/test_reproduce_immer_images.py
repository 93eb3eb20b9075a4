"""Table 2, images and images from elsewhere: choices, claims, networks, and the page at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lapwing_studies.reproduce import immer_images as study_module
from lapwing_studies.reproduce.effort import QUICK, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.immer_images_networks import all_cnn, small_cnn, three_and_three
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Record, Study
from study_pages import page_of, written


def test_networks_have_the_published_shapes() -> None:
    assert three_and_three(1, 28)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert all_cnn(3, 32)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(isinstance(m, torch.nn.Conv2d) for m in all_cnn(3, 32)) == 9
    assert small_cnn(3, 32)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in small_cnn(1, 28).parameters()) < 15_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made_up_images(tmp_path, 150, 60)


def made_up_images(tmp_path: Path, n_train: int, n_test: int) -> Path:
    random = np.random.RandomState(0)
    for name in ("fashion_mnist", "mnist"):
        parts = {}
        for part, n in (("train", n_train), ("test", n_test)):
            y = np.arange(n, dtype=np.uint8) % 10
            x = random.randint(0, 60, (n, 28, 28)).astype(np.uint8)
            x[np.arange(n), 2 * y + 4, :] = 255  # the row tells the class
            parts |= {f"x_{part}": x, f"y_{part}": y}
        np.savez(tmp_path / f"{name}.npz", **parts)
    return tmp_path


def test_a_stopped_study_goes_on_and_its_page_can_be_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(DataFolder(folder), Store(tmp_path / "out"), TOY, n_seeds=1)
    record = study_module.run(study)
    with monkeypatch.context() as patched:
        patched.setattr(study_module.ImageJob, "run", None)
        assert study_module.run(study) == record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert study_module.methods(record) == ["MAP", "BNN", "BNN dampened", "GLM", "GLM diag", "GP 5"]
    text = written("immer2021-images", record, tmp_path)
    assert text.count('role="img"') == 4


def made_up(glm: float, bnn: float) -> Record:
    """Two precisions: the second has the better validation NLL, the first the better evidence."""

    def score(method: str, nll: float, accuracy: float) -> Record:
        return Record(method=method, validation=nll, nll=nll, accuracy=accuracy, ece=nll / 10, ood_auc=1 - nll / 2)

    runs = []
    for precision, extra, evidence in ((1.0, 0.5, -10.0), (10.0, 0.0, -20.0)):
        nlls = {"MAP": (glm + bnn) / 2, "BNN": bnn, "BNN dampened": (glm + bnn) / 2, "GLM": glm, "GP 5": glm}
        scores = [score(m, nll + extra, 0.9 - nll / 10) for m, nll in nlls.items()]
        runs.append(
            Record(
                data="fashion_mnist", seed=0, precision=precision, parameters=1, log_evidence=evidence, seconds=1.0,
                scores=scores,
            )
        )  # fmt: skip
    return Record(study="immer2021-images", effort="quick", n_seeds=1, n_train=1, n_test=1, epochs=1, runs=runs)


def test_the_precision_is_chosen_by_validation_or_by_evidence() -> None:
    record = made_up(0.2, 0.9)
    assert study_module.chosen(record, "fashion_mnist", "GLM")[0]["nll"] == pytest.approx(0.2)
    assert study_module.chosen(record, "fashion_mnist", "GLM", "evidence")[0]["nll"] == pytest.approx(0.7)


def test_claims_hold_when_they_hold_and_fail_when_they_fail() -> None:
    good = [claim.holds for claim in study_module.claims(made_up(0.2, 0.9))]
    bad = [claim.holds for claim in study_module.claims(made_up(0.9, 0.2))]
    # One size of the process, the evidence prefers the worse precision, and no CIFAR-10.
    assert good == [True] * 7 + [None, False, None, None]
    assert bad == [False] * 7 + [None, False, None, None]


@pytest.mark.slow
def test_the_quick_tier_runs(tmp_path: Path) -> None:
    folder = DataFolder(made_up_images(tmp_path, 2500, 1000))
    record = study_module.run(Study(folder, Store(tmp_path / "out"), QUICK, n_seeds=1))
    assert len(record["runs"]) == 2 and all(run["scores"][0]["accuracy"] > 0.5 for run in record["runs"])
    assert page_of("immer2021-images", record).tables
