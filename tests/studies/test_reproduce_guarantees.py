"""The studies of alarms and of conformal intervals at toy size, and their pages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lapwing.errors import InputError
from lapwing_studies.report.study import markdown
from lapwing_studies.reproduce import alarm, conformal, pairs
from lapwing_studies.reproduce.effort import TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.parts import Split
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Record, Study
from study_pages import page_of, written


def folder(path: Path) -> DataFolder:
    """One made-up table with classes, one with numbers, and two made-up collections of texts."""
    g = np.random.default_rng(0)
    y = np.arange(140) % 3
    arrays: dict[str, Any] = {"vehicle_x": (g.normal(size=(140, 4)) + y[:, None]).astype(np.float32), "vehicle_y": y}
    rows = np.stack([g.permutation(140) for _ in range(3)]).astype(np.int32)
    for name, part in (("train", rows[:, :80]), ("valid", rows[:, 80:110]), ("test", rows[:, 110:])):
        arrays[f"vehicle_{name}_idx"] = part
    np.savez(path / "uci_classification.npz", **arrays)
    x = g.normal(size=(150, 3)).astype(np.float32)
    numbers: dict[str, Any] = {}
    for name in conformal.NAMES:
        numbers |= {f"{name}_x": x, f"{name}_y": np.sin(x[:, 0]) + 0.1 * g.normal(size=150).astype(np.float32)}
        order = np.stack([g.permutation(150) for _ in range(2)]).astype(np.int32)
        numbers |= {f"{name}_std_train_idx": order[:, :120], f"{name}_std_test_idx": order[:, 120:]}
    np.savez(path / "uci_regression.npz", **numbers)
    words = [" ".join(g.choice(["good", "bad", "film", "news", "a"], size=5)).encode() for _ in range(400)]
    labels = (np.arange(400) % 2).astype(np.uint8)
    sentences = {f"text_{part}": np.array(words) for part in ("train", "dev", "test")}
    np.savez(path / "sst2.npz", **sentences, **{f"y_{part}": labels for part in ("train", "dev", "test")})
    np.savez(path / "ag_news_test.npz", title=np.array(words), description=np.array(words), y=labels)
    return DataFolder(path)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    path = tmp_path_factory.mktemp("guarantees")
    return Study(folder(path), Store(path / "out"), TOY, 1)


def test_pairs_are_listed_where_their_data_are(study: Study) -> None:
    names = [pair.name for pair in pairs.listed(study.folder)]
    assert {"vehicle-shifted", "ag-sst2", "sst2-ag", "digits-turned"} <= set(names)
    assert [p.name for p in pairs.listed(DataFolder(None))] == ["digits-turned"]
    assert len(pairs.PAIRS) == 8


def test_outside_of_a_table_is_its_test_rows_moved(study: Study) -> None:
    pair = next(p for p in pairs.PAIRS if p.name == "vehicle-shifted")
    parts = pair.parts(study.folder, 0, TOY)
    torch.testing.assert_close((parts.outside - parts.test.x).abs(), torch.ones_like(parts.test.x))


def test_texts_know_the_words_of_the_training_part(study: Study) -> None:
    pair = next(p for p in pairs.PAIRS if p.name == "sst2-ag")
    parts = pair.parts(study.folder, 0, TOY)
    assert parts.train.x.shape == (240, 32) and parts.train.x.dtype == torch.long
    assert parts.n_classes == 2 and int(parts.train.x.max()) <= 6
    assert bool((parts.train.x[:, 5:] == 0).all())


def test_the_alarm_study(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some = tuple(p for p in pairs.PAIRS if p.name in ("vehicle-shifted", "digits-turned"))
    monkeypatch.setattr(pairs, "PAIRS", some)
    record = alarm.run(study)
    for run in record["runs"]:
        assert run["seed"] == alarm.FIRST_SEED
        assert set(run["auroc"]) == set(alarm.METHODS)
        assert all(0 <= v <= 1 for v in run["auroc"].values())
    record["runs"][0]["examples"] = [
        Record(pixels=[[0, 255], [128, 0]], label=3, confidence=0.98, p_value=0.01) for _ in range(3)
    ]
    page, text = page_of("alarm", record), written("alarm", record, tmp_path)
    assert "turned digits" in text and "class 3 at 98%" in text
    assert "entropy" in markdown(page.tables[1])
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_no_examples_no_pictures(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "PAIRS", tuple(p for p in pairs.PAIRS if p.name == "vehicle-shifted"))
    record = alarm.run(study)
    assert len(page_of("alarm", record).figures) == 1 and written("alarm", record, tmp_path)


def test_the_conformal_study(study: Study, tmp_path: Path) -> None:
    record = conformal.run(study)
    assert [run["data"] for run in record["runs"]] == list(conformal.NAMES)
    for run in record["runs"]:
        assert run["n_calibrated"] >= 9 and run["scaled"]["length"] > 0
    text = written("conformal", record, tmp_path)
    assert "boston" in text and "Intervals with a guarantee" in text


def test_constant_width_is_a_rank_of_the_residuals() -> None:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    y = torch.arange(1.0, 20.0)[:, None]  # 19 residuals: rank ⌈20 × 0.9⌉ = 18
    found = conformal._constant_width(model, Split(torch.zeros(19, 1), y), Split(torch.zeros(19, 1), y))
    assert math.isclose(found["length"], 36) and math.isclose(found["coverage"], 18 / 19, abs_tol=1e-3)


def test_data_are_asked_for_in_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--data FOLDER"):
        conformal.run(Study(DataFolder(None), Store(tmp_path), TOY, 1))
