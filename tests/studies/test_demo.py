"""The demo at toy size, from training to the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lapwing.cli.app import app
from lapwing_studies.bench.records import DemoRecord
from lapwing_studies.bench.sizes import TOY
from lapwing_studies.demo import images, run
from lapwing_studies.demo.digits import SWEEP
from lapwing_studies.report.page import render
from lapwing_studies.report.picture import write_picture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def record() -> DemoRecord:
    return run.run(seed=0, size=TOY)


def test_the_record_is_plain_json_without_nan(record: DemoRecord) -> None:
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_every_predictive_has_its_rows(record: DemoRecord) -> None:
    assert [(r["method"], r["tuning"]) for r in record["digits"]["rows"]] == [
        ("MAP", "–"),
        ("sampled network", "as in training"),
        ("GLM", "as in training"),
        ("sampled network", "evidence"),
        ("GLM", "evidence"),
        ("sampled network", "validation"),
        ("GLM", "validation"),
    ]
    assert len(record["regression"]["rows"]) == 6
    for row in record["digits"]["rows"]:
        assert 0 <= row["ood_auc_photos"] <= 1
        assert 0 <= row["ood_auc_turned"] <= 1
        assert 0 <= row["brier"] <= 2


def test_photo_patches_are_stretched_and_seeded() -> None:
    patches = images.photo_patches(20, seed=3)
    assert patches.shape == (20, 64)
    assert torch.equal(patches.amin(-1), torch.zeros(20))
    assert torch.equal(patches.amax(-1), torch.ones(20))
    assert torch.equal(patches, images.photo_patches(20, seed=3))
    assert not torch.equal(patches, images.photo_patches(20, seed=4))


def test_a_quarter_turn_moves_corners_round() -> None:
    image = torch.zeros(1, 8, 8)
    image[0, 0, 7] = 1.0
    assert images.quarter_turn(image.reshape(1, 64)).reshape(8, 8)[0, 0] == 1.0


def test_the_held_out_choice_is_at_the_foot_of_the_curve_of_the_glm(record: DemoRecord) -> None:
    """Where the curve is flat, a weak preference for the evidence's own scale decides."""
    curve = record["digits"]["evidence"]
    chosen = curve["held_out_glm"][curve["precision"].index(curve["by_validation"])]
    assert chosen <= min(curve["held_out_glm"]) + 0.01 < max(curve["held_out_glm"])
    assert 10 ** SWEEP[0] <= curve["precision"][0] < curve["precision"][-1] <= 10 ** SWEEP[1]
    assert len(curve["precision_sampled"]) == TOY.n_precisions


def test_bands_grow_as_the_prior_loosens_and_hold_the_noise(record: DemoRecord) -> None:
    regression = record["regression"]
    middles = [band["epistemic_std"][len(regression["x"]) // 2] for band in regression["bands"]]
    assert middles == sorted(middles, reverse=True)
    tuned = regression["bands"][regression["tuned"]]
    for epistemic, total in zip(tuned["epistemic_std"], tuned["total_std"], strict=True):
        assert math.isclose(total**2, epistemic**2 + regression["noise_std"] ** 2, rel_tol=1e-3)


def test_the_tuned_prior_is_the_best_of_its_sweep(record: DemoRecord) -> None:
    evidence = [band["log_evidence"] for band in record["regression"]["bands"]]
    assert max(evidence) == evidence[record["regression"]["tuned"]]


def test_the_same_seed_gives_the_same_record_and_leaves_torch_alone(record: DemoRecord) -> None:
    before = torch.random.get_rng_state()
    again = run.run(seed=0, size=TOY)
    assert torch.equal(before, torch.random.get_rng_state())
    assert {**again, "seconds": 0} == {**record, "seconds": 0}


def test_page_and_picture_come_out_of_a_real_record(record: DemoRecord, tmp_path: Path) -> None:
    assert "Handwritten digits" in render(record)
    assert write_picture(record, tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_writes_everything_and_says_where(
    record: DemoRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run", lambda **_: record)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "report.html") in result.output.splitlines()[-1]
    assert (tmp_path / "report.html").exists()
    assert json.loads((tmp_path / "record.json").read_text()) == record


def test_json_is_all_that_is_printed_for_machines(
    record: DemoRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "run", lambda **_: record)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--json"])
    assert json.loads(result.stdout) == record


def test_a_missing_extra_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, *rest: Any) -> object | None:
        return None if name == "jinja2" else object()

    monkeypatch.setattr(cli, "find_spec", find_spec)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "pip install 'lapwing[demo]'" in result.stderr
