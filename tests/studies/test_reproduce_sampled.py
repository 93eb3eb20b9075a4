"""The study of samples of the full GGN: its joint score, and its page at toy size."""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path

import pytest
import torch

from lapwing_studies.report import sampled as report
from lapwing_studies.report.study import markdown
from lapwing_studies.reproduce.effort import TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.image_networks import staged_resnet
from lapwing_studies.reproduce.sampled import SIZES, run
from lapwing_studies.reproduce.scores import N_LABELS, joint_nll
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study
from study_pages import written


def test_the_joint_score_is_that_of_functions() -> None:
    """One input: two equally likely functions, of which one knows all ten labels and the other is at chance."""
    f = torch.tensor([[[50.0, 0.0]], [[0.0, 0.0]]], dtype=torch.float64)
    assert (
        abs(joint_nll(f, torch.zeros(1, dtype=torch.long), 500, seed=0) + log((1 + exp(-N_LABELS * log(2))) / 2))
        < 1e-12
    )


def test_the_network_has_as_many_parameters_as_we_say() -> None:
    for name in ("full", "quick"):
        assert sum(p.numel() for p in staged_resnet(12, SIZES[name].widths).parameters()) == 103_642


@pytest.mark.slow
def test_the_page_can_be_made_and_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study(DataFolder(None), Store(tmp_path), TOY, n_seeds=1)
    record = run(study)
    (tmp_path / "records" / "sampled-laplace-digits-toy-0.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr("lapwing.api.tune", None)  # every posterior is kept: nothing is tuned again
        assert run(study) == record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    text = written("sampled-laplace", record, tmp_path)
    assert text.count('role="img"') == 2
    assert len(markdown(report.scores(record)).splitlines()) == 2 + 5
