"""`lapwing reproduce` at toy size, on data that scikit-learn brings along."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from lapwing.cli.app import app
from lapwing.errors import InputError
from lapwing_studies.report import battery as battery_report
from lapwing_studies.report.study import markdown
from lapwing_studies.reproduce import battery, scores, sources, tasks
from lapwing_studies.reproduce.architectures import cnn, groups_of_four, mlp, seeded
from lapwing_studies.reproduce.battery import METHODS
from lapwing_studies.reproduce.effort import QUICK, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.means import standard_error
from lapwing_studies.reproduce.parts import Parts, Scaling, Split, stratified, wide_box
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.summary import claims, lines
from lapwing_studies.reproduce.training import Recipe, train
from study_pages import written

NO_DATA = DataFolder(None)


def study(folder: Path, **changes: Any) -> Study:
    return replace(Study(NO_DATA, Store(folder), TOY, n_seeds=1), **changes)


# --- data ------------------------------------------------------------------------------------------------


def test_data_that_are_not_there_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--data FOLDER"):
        NO_DATA.grey("mnist")
    np.savez(tmp_path / "other.npz", x=np.zeros(1))
    with pytest.raises(InputError, match=r"mnist.npz does not exist.*holds other.npz"):
        DataFolder(tmp_path).grey("mnist")
    with pytest.raises(InputError, match="lacks y; it holds x"):
        DataFolder(tmp_path).arrays("other", ["x", "y"])


def test_images_of_another_shape_are_refused_in_words(tmp_path: Path) -> None:
    images, labels = np.zeros((2, 28, 28), np.uint8), np.array([0, 12], np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(InputError, match="labels from 0 to 9, found 0 to 12"):
        DataFolder(tmp_path).grey("mnist")
    np.savez(tmp_path / "fashion_mnist.npz", x_train=images[:, 1:], y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(InputError, match=r"found \(2, 27, 28\)"):
        DataFolder(tmp_path).grey("fashion_mnist")


def test_colours_come_back_from_their_residuals(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    residual = x.copy()
    residual[:, 0] -= x[:, 1]
    residual[:, 2] -= x[:, 1]
    residual[:, :, 1:] -= residual[:, :, :-1].copy()
    np.savez(tmp_path / "cifar10_test.npz", x_residual=residual, y=np.array([1, 2, 9], np.uint8))
    decoded, labels = DataFolder(tmp_path).colour("cifar10_test")
    assert np.array_equal(decoded, x)
    assert labels.tolist() == [1, 2, 9]


def test_a_stratified_cut_keeps_shares_and_loses_nothing() -> None:
    y = torch.tensor([0] * 40 + [1] * 20 + [2] * 100)
    parts = stratified(y, (0.7, 0.15), seed=3)
    assert torch.cat(parts).sort().values.tolist() == list(range(160))
    assert [y[p].bincount().tolist() for p in parts] == [[28, 14, 70], [6, 3, 15], [6, 3, 15]]
    assert all(map(torch.equal, parts, stratified(y, (0.7, 0.15), seed=3)))


def test_a_column_without_spread_is_only_shifted() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    assert Scaling.of(x)(x).tolist() == [[-1.0, 0.0], [1.0, 0.0]]


def test_the_box_outside_is_twice_as_wide() -> None:
    x = torch.tensor([[-1.0, 10.0], [3.0, 10.5]])
    box = wide_box(x, 4000, seed=0)
    torch.testing.assert_close(box.amin(0), torch.tensor([-3.0, 9.75]), atol=0.02, rtol=0)
    torch.testing.assert_close(box.amax(0), torch.tensor([5.0, 10.75]), atol=0.02, rtol=0)


def test_targets_and_inputs_are_scaled_by_the_training_rows() -> None:
    parts = sources.numbers_of_sklearn("load_diabetes", NO_DATA, 0, QUICK)
    for values in (parts.train.x, parts.train.y):
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]))
    assert parts.train.y.shape == (len(parts.train.x), 1)
    assert len(parts.outside) == len(parts.test)


def test_small_images_lose_their_border_and_half_their_side(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (80, 28, 28), dtype=np.uint8), np.arange(80, dtype=np.uint8) % 10
    for name in ("mnist", "fashion_mnist"):
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    whole = sources.grey_images("mnist", "fashion_mnist", DataFolder(tmp_path), 0, TOY)
    small = sources.small_grey_images("mnist", "fashion_mnist", DataFolder(tmp_path), 0, TOY)
    assert small.train.x.shape == (60, 1, 12, 12) and len(small.validation) == 15
    torch.testing.assert_close(small.test.x[0, 0, 0, 0], whole.test.x[0, 0, 2:4, 2:4].mean())


# --- networks, training, store ---------------------------------------------------------------------------


def test_networks_have_the_layers_they_name() -> None:
    kinds = [type(m) for m in mlp([3, 4, 2], nn.ReLU, nn.LayerNorm)]
    assert kinds == [nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear]
    assert [type(m) for m in mlp([3, 4, 2], nn.Tanh)] == [nn.Linear, nn.Tanh, nn.Linear]
    assert cnn(8, (1, 4, 8), 10, groups_of_four)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def small_parts() -> Parts:
    """Targets are mostly noise, so that training for long is worse than stopping."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    split = Split(x, x[:, :1] + 2 * torch.randn(40, 1, generator=generator))
    return Parts(split.rows(slice(0, 20)), split.rows(slice(20, 30)), split.rows(slice(30, 40)), 3 * x[:10], "wide")


def squares(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(f, y)


def test_early_stopping_goes_back_to_the_best_weights_and_leaves_random_numbers_alone() -> None:
    parts, before = small_parts(), torch.random.get_rng_state()
    recipe = Recipe(n_epochs=60, learning_rate=0.05, batch_size=8, patience=3)
    model = train(seeded(lambda: mlp([3, 20, 1], nn.Tanh), seed=0), parts, squares, recipe, seed=0)
    longer = train(
        seeded(lambda: mlp([3, 20, 1], nn.Tanh), seed=0), parts, squares, replace(recipe, patience=None), seed=0
    )
    held_out = [float(squares(m(parts.validation.x), parts.validation.y).detach()) for m in (model, longer)]
    assert held_out[0] < held_out[1]
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(before, torch.random.get_rng_state())


def test_kept_weights_come_back_only_for_what_they_were_made_with(tmp_path: Path) -> None:
    store, model = Store(tmp_path), mlp([3, 4, 2], nn.ReLU, nn.BatchNorm1d)
    model(torch.randn(8, 3))  # moves the running statistics
    store.keep_weights("net", "this", model)
    other = mlp([3, 4, 2], nn.ReLU, nn.BatchNorm1d)
    assert not store.load_weights("net", "that", other)
    assert not store.load_weights("absent", "this", other)
    assert store.load_weights("net", "this", other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_kept_records_come_back_only_for_what_they_were_made_with(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.keep_record("run", "this", {"a": 1})
    assert store.record("run", "this") == {"a": 1}
    assert store.record("run", "that") is None
    assert store.record("absent", "this") is None


# --- scores ----------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_the_temperature_undoes_a_scale() -> None:
    f = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    y = torch.distributions.Categorical(logits=f).probs.multinomial(1, generator=torch.Generator().manual_seed(1))[:, 0]
    one, five = (scores.best_temperature(Fixed(s), Split(f, y)) for s in (1.0, 5.0))
    assert one == pytest.approx(1.0, abs=0.25)
    assert five == pytest.approx(5 * one, rel=1e-4)


def test_one_logit_is_two_classes() -> None:
    f = torch.tensor([[0.3], [-2.0]])
    torch.testing.assert_close(scores.two_sided(f).softmax(-1)[:, 1:], f.sigmoid())


def test_quantiles_of_the_right_normal_are_calibrated() -> None:
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    y = 2 + 3 * math.sqrt(2) * torch.erfinv(2 * u - 1)
    mean = torch.full_like(y, 2.0)
    assert scores.interval_calibration(mean, 0 * mean + 3, y) < 0.002
    assert scores.interval_calibration(mean, 0 * mean + 30, y) > 0.2


def test_a_constant_noise_is_no_alarm() -> None:
    parts = small_parts()
    score = scores.map_numbers(mlp([3, 4, 1], nn.Tanh), parts, parts.train).score("MAP", parts.test.y)
    assert score["ood_auc"] == 0.5


# --- the battery -----------------------------------------------------------------------------------------

FEW = ("wine", "breast-cancer", "diabetes-bn")


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASKS", tuple(t for t in tasks.TASKS if t.name in FEW))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """A folder in which a few tasks have been run, and their record."""
    folder = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "TASKS", tuple(t for t in tasks.TASKS if t.name in FEW))
        return folder, battery.run(study(folder / "battery"))


def test_the_battery_has_what_was_promised() -> None:
    assert len(tasks.TASKS) >= 12
    assert len({t.name for t in tasks.TASKS}) == len(tasks.TASKS)
    assert {t.recipe.stops for t in tasks.TASKS} == {"to the end", "early-stopped"}
    assert {t.kind for t in tasks.TASKS} == {"classes", "two classes", "numbers"}
    assert len(tasks.listed(NO_DATA)) == 6


def test_a_run_is_plain_json(done: tuple[Path, Record]) -> None:
    _, record = done
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert [run["task"] for run in record["runs"]] == list(FEW)
    for run in record["runs"]:
        assert [s["method"] for s in run["scores"]] == list(METHODS)
        assert all(0 <= s["ood_auc"] <= 1 for s in run["scores"])


def test_what_is_done_is_not_done_again(
    few_tasks: None, done: tuple[Path, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record = done
    monkeypatch.setattr(battery.BatteryJob, "run", lambda self: pytest.fail("was run again"))
    assert battery.run(study(folder / "battery")) == record


def test_again_scores_again_with_the_kept_network(
    few_tasks: None, done: tuple[Path, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record = done
    monkeypatch.setattr(tasks, "TASKS", tasks.TASKS[:1])
    monkeypatch.setattr("lapwing_studies.reproduce.study.train", lambda *a, **k: pytest.fail("was trained again"))
    second = battery.run(study(folder / "battery", again=True))
    assert second["runs"][0]["scores"] == record["runs"][0]["scores"]


def made_up(gain: float, *, warned: bool = True) -> Record:
    """Twelve tasks where evidence + validation saves `gain` nats on temperature, and evidence alone loses."""
    nll = dict(zip(METHODS, (1.0, 0.9, 1.2, 0.9 - gain), strict=True))
    rows = [{"method": m, "nll": v, "ece": 0.1, "ood_auc": 1 - v / 2, "error": 0.1} for m, v in nll.items()]
    concerns = ["! mode: the evidence is not to be trusted here"] if warned else ["! condition number: large"]
    run: Any = {
        "kind": "classes", "network": "MLP", "stops": "to the end", "outside": "noise", "parameters": 10,
        "structure": "full", "n_train": 3, "n_validation": 2, "n_test": 2, "seconds": {}, "scores": rows,
        "concerns": concerns, "notices": [], "chosen": "",
    }  # fmt: skip
    runs = [{**run, "task": f"task-{k}", "seed": s} for k in range(12) for s in range(2)]
    return {"study": "battery", "effort": "toy", "n_seeds": 2, "runs": runs}


def test_claims_hold_when_they_hold() -> None:
    found = claims(made_up(0.03))
    assert [c.holds for c in found] == [True] * 6 + [False, True]
    assert found[1].found == "12 of 12"
    assert found[3].found == "0.030"


def test_claims_fail_when_they_fail() -> None:
    assert [c.holds for c in claims(made_up(0.01, warned=False))] == [True] * 3 + [False] + [True] * 2 + [False] * 2
    assert [c.holds for c in claims(made_up(-0.2))][:4] == [False] * 4
    assert "silent: task-0" in claims(made_up(0.0, warned=False))[-1].found


def test_a_line_is_a_mean_over_seeds() -> None:
    record = made_up(0.0)
    record["runs"][0]["scores"] = [{**s, "nll": s["nll"] + 1} for s in record["runs"][0]["scores"]]
    first = lines(record)[0]
    assert first.mean("MAP", "nll") == pytest.approx(1.5)
    assert standard_error(first.values("MAP", "nll")) == pytest.approx(0.5)


def test_the_page_and_the_markdown_name_every_task(tmp_path: Path) -> None:
    text = written("battery", made_up(0.03), tmp_path)
    assert text.count("<svg") == 3  # two figures and the bird
    assert "task-11" in text and "lapwing reproduce battery" in text
    table = markdown(battery_report.nll_table(made_up(0.03))).splitlines()
    assert table[1].startswith("| --- | --- | --- | ---: |")
    assert "**0.870 ± 0.000**" in table[2] and "worse, warned" in table[2]


def test_the_command_prints_and_writes(
    few_tasks: None, done: tuple[Path, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lapwing_studies.reproduce import effort

    monkeypatch.setattr(effort, "QUICK", TOY)
    out, _ = done
    arguments = ["reproduce", "battery", "--quick", "--out", str(out)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "diabetes-bn" in result.output
    folder = out / "battery"
    assert "diabetes-bn" in (folder / "report.html").read_text()
    assert "diabetes-bn" in (folder / "tables.md").read_text()
    machine = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(machine.stdout) == json.loads((folder / "record.json").read_text())


@pytest.mark.parametrize(
    ("options", "words"), [(["--data", "/nowhere"], "is not a folder"), (["--seeds", "0"], "at least 1")]
)
def test_wrong_options_are_refused_in_words(options: list[str], words: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", "battery", "--out", str(tmp_path), *options])
    assert result.exit_code == 1
    assert words in result.stderr
