"""The tutorial's pictures against their worked values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lapwing_studies.reproduce import tutorial
from lapwing_studies.reproduce.effort import QUICK, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study
from lapwing_studies.reproduce.tutorial_networks import mode_panel, network_panel, scale_panel
from study_pages import written


def test_the_skewed_density() -> None:
    worked = {"mode": 0.0774795810, "a": 2.5435885342, "log Z": 0.3723834737, "mean": 0.6728003, "variance": 0.4138722,
              "log Z Laplace": 0.4452675418}  # fmt: skip
    assert tutorial.density_panel()["values"] == pytest.approx(worked, abs=1e-7)


@pytest.mark.parametrize(
    ("alpha", "evidences", "exact"),
    [(1.0, (-4.31864485, -4.27506370), 0.782857), (0.1, (-5.31145615, -5.13612047), 0.878699)],
)
def test_logistic_regression(alpha: float, evidences: tuple[float, float], exact: float) -> None:
    values = tutorial.logistic_panel(alpha)["values"]
    assert (values["log Z Laplace"], values["log Z"]) == pytest.approx(evidences, abs=1e-6)
    assert values["exact at 1.5"] == pytest.approx(exact, abs=1e-5)
    if alpha == 1.0:
        found = [values[f"{name} at {x}"] for x in ("1.5", "-6") for name in ("Laplace", "probit", "MAP")]
        assert found == pytest.approx([0.744473, 0.747535, 0.785083, 0.099588, 0.109673, 0.006587], abs=2e-6)
        assert (values["MAP w"], values["MAP b"]) == pytest.approx((0.84153639, 0.03323085), abs=1e-6)


def test_a_normalised_group_has_no_minimum() -> None:
    panel = scale_panel()
    with_norm = panel["curves"]["with LayerNorm"]
    assert with_norm == sorted(with_norm)  # falls all the way to the smallest scale
    assert 0.5 < panel["values"]["lowest at, without"] < 2


def test_the_evidence_at_the_linear_mode_is_above_that_at_the_trained_weights() -> None:
    """Both share the log determinant, and the mode minimises the rest."""
    panel = mode_panel()
    linear, trained = (torch.tensor(panel["curves"][name]) for name in ("linear mode", "trained weights"))
    assert (linear >= trained - 1e-6).all()
    assert panel["values"]["trained weights"] < panel["values"]["linear mode"]


@pytest.mark.slow
def test_the_evidence_framework() -> None:
    values = network_panel()["values"]
    assert values["gamma"] == pytest.approx(12.553, abs=0.05)
    assert values["alpha"] == pytest.approx(0.1045, rel=0.02)
    assert values["sigma"] == pytest.approx(0.0753, rel=0.01)
    assert values["log Z"] == pytest.approx(-0.504, abs=0.05)
    assert values["RMSE"] == pytest.approx(0.0488, abs=0.001)


def test_the_page_can_be_made(tmp_path: Path) -> None:
    study = Study(DataFolder(None), Store(tmp_path), TOY, n_seeds=1)
    record = tutorial.run(study)
    assert tutorial.run(study) == json.loads(json.dumps(record, allow_nan=False))
    text = written("tutorial", record, tmp_path)
    assert text.count('role="img"') == 5
    claims = tutorial.claims(record)
    assert len(claims) == 8 and claims[0].holds and not math.isnan(record["runs"][2]["values"]["gamma"])


@pytest.mark.slow
def test_every_claim_holds(tmp_path: Path) -> None:
    record = tutorial.run(Study(DataFolder(None), Store(tmp_path), QUICK, n_seeds=1))
    assert [claim.says for claim in tutorial.claims(record) if not claim.holds] == []
