"""The gap example: the published order holds, and its page can be made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lapwing_studies.report import subnetwork as report
from lapwing_studies.report.study import markdown
from lapwing_studies.reproduce import subnetwork
from lapwing_studies.reproduce.effort import FULL, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study
from study_pages import written


def test_data_are_the_same_every_time_and_leave_gaps() -> None:
    (train, test), again = subnetwork.data(), subnetwork.data()
    assert torch.equal(train.x, again[0].x)
    assert len(train) == len(test) == 501
    both = torch.cat([train.x, test.x])
    assert not ((both > 0) & (both < 1.7)).any()
    assert not ((both > 2.5) & (both < 4)).any()


@pytest.mark.slow
def test_the_page_can_be_made(tmp_path: Path) -> None:
    record = subnetwork.run(Study(DataFolder(None), Store(tmp_path), TOY, n_seeds=1))
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    text = written("subnetwork-1d", record, tmp_path)
    assert text.count("<svg") == len(report.SHOWN) + 1  # and the bird
    assert len(markdown(report.by_choice(record)).splitlines()) == 2 + 3 + 15


@pytest.mark.slow
def test_the_published_order_holds(tmp_path: Path) -> None:
    run = subnetwork.run(Study(DataFolder(None), Store(tmp_path), FULL, n_seeds=1))["runs"][0]
    rows = {(row["method"], row["k"]): row for row in run["rows"]}
    full, diagonal = rows["all weights", 2600], rows["diagonal", 2600]
    assert rows["swag", 1300]["gap_std"] >= 0.8 * full["gap_std"]
    assert all(row["gap_std"] <= full["gap_std"] * (1 + 1e-5) for row in run["rows"] if row is not diagonal)
    for k in (26, 78):
        assert rows["swag", k]["gap_std"] > rows["random", k]["gap_std"]
        assert rows["functional", k]["gap_std"] > rows["random", k]["gap_std"]
    assert diagonal["gap_std"] / diagonal["data_std"] < full["gap_std"] / full["data_std"]
