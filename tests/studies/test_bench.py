"""The benchmark: cases run, rows are well formed, charts and tables are made of them. No clock is asserted about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lapwing.cli.app import app
from lapwing.errors import InputError
from lapwing_studies.bench import runner
from lapwing_studies.bench.case import CASES, GE, Timed, listed, measure, ratio
from lapwing_studies.bench.memory import peak_mib, resident_mib
from lapwing_studies.bench.workloads import WORKLOADS, Workload, build
from lapwing_studies.report.benchmarks import markdown, write_chart

SIZES = {"W1": 2701, "W2": 1_333_770, "W3": 892_010, "W4": 272_474, "W5": 996_362, "W5-mha": 1_007_370, "W6": 2_049_000}

ROWS: list[Any] = [
    runner.failed("W5", "kron-fit", "cannot run: RuntimeError: no"),
    {**runner.failed("W2", "kron-fit", ""), "ratio": 12.0, "peak_mib": 100.0},
    {**runner.failed("W3", "covariance", ""), "ratio": 9.0, "peak_mib": 600.0},
    {**runner.failed("W2", "tune", ""), "ratio": 0.5, "peak_mib": 1.0},
]
PEERS = [{"library": "other", "workload": "W2", "case": "kron-fit", "ratio": 20.0, "unit": GE, "note": "easier"}]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_what_it_says(name: str) -> None:
    workload = build(name)
    assert workload.n_parameters == SIZES[name]
    assert not workload.model.training
    assert len(workload.x) == 256
    few = workload.smaller(2)
    few.gradient_epoch()
    few.forward()
    torch.testing.assert_close(build(name).model(few.x), workload.model(few.x))  # the same every time


@pytest.mark.parametrize("case", CASES)
def test_every_case_runs_and_gives_a_row(case: str) -> None:
    name = min(CASES[case].goals)
    row = measure(case, _tiny(name), seconds=0.0)
    assert (row["workload"], row["case"], row["unit"]) == (name, case, CASES[case].unit)
    assert row["goal"] == CASES[case].goals[name]
    assert row["ratio"] is not None and row["ratio"] > 0
    json.dumps(row, allow_nan=False)


def _tiny(name: str) -> Workload:
    """A workload by that name that takes no time."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    batches = [(torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))]
    return Workload(name, "tiny", model.eval(), batches, torch.rand(6, 4))


def test_work_that_is_its_own_unit_has_ratio_one() -> None:
    x = torch.rand(300, 300)
    assert ratio(Timed(lambda: x @ x, lambda: x @ x), seconds=0.0) > 0


def test_the_peak_sees_memory_that_is_given_back() -> None:
    before = resident_mib()
    peak = peak_mib(lambda: torch.ones(64 << 18))  # 64 MiB
    if before is None or peak is None:
        pytest.skip("this system does not say how much memory a process holds")
    assert peak - before > 50


def test_a_case_runs_in_a_process_of_its_own() -> None:
    row = runner._row("W1", "full-tune", 300.0)
    assert row["ratio"] is not None, row["note"]


def test_a_case_that_fails_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.sys, "executable", "/bin/false")
    row = runner._row("W1", "full-fit", 300.0)
    assert row["ratio"] is None
    assert row["note"].startswith("cannot run")


def test_a_new_row_replaces_the_old_one() -> None:
    old, new = runner.failed("W3", "tune", "old"), runner.failed("W3", "tune", "new")
    other = runner.failed("W2", "tune", "other")
    assert runner.merged([old, other], [new]) == [other, new]


def test_an_unknown_workload_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="there are W1, W2"):
        listed("W9")
    assert {name for name, _ in listed()} == set(WORKLOADS)


def test_the_command_prints_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", lambda workload: iter(ROWS))
    result = CliRunner().invoke(app, ["bench", "--out", str(tmp_path)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "missed" in result.output
    saved = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert sorted(map(str, saved)) == sorted(map(str, ROWS))
    chart = tmp_path / "chart.svg"
    drawn = CliRunner().invoke(app, ["bench", "--out", str(tmp_path), "--chart", str(chart)])
    assert drawn.exit_code == 0, drawn.output
    assert "<svg" in chart.read_text()


def test_a_chart_of_nothing_is_refused_in_words(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--out", str(tmp_path), "--chart", str(tmp_path / "c.svg")])
    assert result.exit_code == 1
    assert "holds no measurements" in result.stderr


def test_the_table_says_where_a_goal_is_missed(tmp_path: Path) -> None:
    table = markdown(ROWS, PEERS).splitlines()
    assert "12 (missed)" in table[3] and "other 20 (easier)" in table[3]
    assert "600 (goal 512: missed)" in table[4]
    assert "cannot run" in table[2]
    assert write_chart(ROWS, PEERS, tmp_path / "chart.png").stat().st_size > 0
