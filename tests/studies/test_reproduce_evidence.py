"""The studies of the evidence at the right mode: networks, records, pages, and the effect itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.report import antoran as antoran_report
from lapwing_studies.report import batchnorm as batchnorm_report
from lapwing_studies.report.study import markdown, write_study
from lapwing_studies.reproduce import antoran, batchnorm, image_networks
from lapwing_studies.reproduce.architectures import seeded
from lapwing_studies.reproduce.effort import FULL, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.image_networks import NETWORKS, NORMALISED
from lapwing_studies.reproduce.published import ANTORAN_2022
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study
from study_pages import page_of, written


def study(folder: Path, effort: Any = TOY) -> Study:
    return Study(DataFolder(None), Store(folder), effort, n_seeds=1)


# --- a batch-normed network in one dimension ---------------------------------------------------------------


def test_the_network_has_two_thousand_six_hundred_weights() -> None:
    model = batchnorm.network()
    assert sum(m.weight.numel() for m in model if isinstance(m, nn.Linear)) == batchnorm.N_WEIGHTS == 2600
    assert n_parameters(model) == 2800


def test_test_points_are_everywhere_and_training_points_are_not() -> None:
    curve = batchnorm.data(0)
    x = curve.parts.train.x * curve.scale_x.std + curve.scale_x.mean
    assert bool(torch.stack([(x > low - 1e-4) & (x < high + 1e-4) for low, high in batchnorm.PLACES]).any(0).all())
    share = float(curve.between.double().mean())
    assert share == pytest.approx(1 - 2.8 / 6, abs=0.01)


def test_the_classic_evidence_picks_a_precision_ten_times_too_small(tmp_path: Path) -> None:
    run = batchnorm.run(study(tmp_path, FULL))["runs"][0]
    classic, *linear = run["rows"]
    assert classic["evidence"] == "trained weights"
    for row in linear:  # one precision, and one for each normalised group
        assert row["evidence"] == "linear mode"
        assert row["precision"] > 10 * classic["precision"]
        assert row["nll"] < classic["nll"] - 0.3
        assert row["gap_std"] < classic["gap_std"] / 2


def made_up_curve() -> Any:
    rows = [
        {
            "evidence": evidence, "groups": groups, "precision": precision, "noise_std": 0.2,
            "precisions": [precision] * (1 if groups == "one" else 2),
            "nll": 1 / precision, "nll_data": 0.0, "nll_gap": 1.0, "gap_std": 2.0,
            "band": {"mean": [0.0, 1.0], "std": [1.0, 2.0]},
        }
        for (evidence, groups), precision in zip(batchnorm.TUNINGS, (0.5, 8.0, 8.0), strict=True)
    ]  # fmt: skip
    run = {
        "seed": 0, "weights": 2600, "parameters": 2800, "n_train": 2, "train_x": [0.0, 1.0], "train_y": [0.0, 1.0],
        "grid": [0.0, 1.0], "truth": [0.0, 1.0], "rows": rows,
    }  # fmt: skip
    return {"study": "batchnorm-1d", "effort": "toy", "n_seeds": 2, "runs": [run, run]}


def test_the_curve_has_a_page_and_a_picture(tmp_path: Path) -> None:
    page = page_of("batchnorm-1d", made_up_curve())
    assert page.headlines[0].value == "0.5 against 8" and page.headlines[0].says.endswith("holds")
    text = write_study(page, tmp_path / "report.html").read_text()
    assert text.count("<svg") == 3 and "2,600 weights" in text
    assert "| linear mode | normalised | 8 … 8 |" in markdown(batchnorm_report.scores(made_up_curve()))


# --- five networks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("side", [8, 12])
def test_every_network_has_about_46_000_parameters(name: str, side: int) -> None:
    model = seeded(lambda: NETWORKS[name](side), seed=0)
    assert abs(n_parameters(model) - 46_000) < 1500
    assert model.eval()(torch.rand(3, 1, side, side)).shape == (3, 10)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_normalised_networks_are_those_with_norms(name: str) -> None:
    kinds = (nn.BatchNorm2d, nn.LayerNorm)
    assert any(isinstance(m, kinds) for m in NETWORKS[name](8).modules()) == (name in NORMALISED)


def test_fixup_starts_as_a_constant() -> None:
    model = seeded(lambda: NETWORKS["Fixup"](8), seed=0).eval()
    assert torch.equal(model(torch.rand(2, 1, 8, 8)), torch.zeros(2, 10))
    # A block whose last convolution is zero passes its input on.
    block, x = image_networks.FixupBlock(4, 4, 1), torch.rand(2, 4, 5, 5)
    nn.init.zeros_(block.second.weight)
    torch.testing.assert_close(block(x), x)


def test_published_numbers_cover_every_network_and_way() -> None:
    assert [(p["evidence"], p["prior"]) for p in ANTORAN_2022] == list(antoran_report.WAYS)
    assert all(set(p["nll"]) == set(NETWORKS) for p in ANTORAN_2022)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CNN", "Pre-ResNet"])
def test_a_network_is_tuned_in_four_ways(name: str, tmp_path: Path) -> None:
    run = antoran.AntoranJob(name, 0, study(tmp_path)).run()
    assert json.loads(json.dumps(run, allow_nan=False)) == run
    assert [(r["evidence"], r["prior"]) for r in run["rows"]] == [antoran_report.PLAIN, *antoran_report.WAYS]
    assert run["data"].startswith("scikit-learn digits")
    assert {r["groups"] for r in run["rows"]} == {"–", "one", "normalised" if name in NORMALISED else "layer"}


def made_up_table() -> Any:
    nll = dict(zip((antoran_report.PLAIN, *antoran_report.WAYS), (0.1, 0.2, 0.15, 0.5, 0.1), strict=True))
    rows = [
        {
            "evidence": way[0], "prior": way[1], "groups": "one", "precision": None if way[1] == "–" else 2.0,
            "nll": value, "ece": 0.1, "error": 0.1, "ood_auc": 0.9, "seconds": 1.0,
        }
        for way, value in nll.items()
    ]  # fmt: skip
    common = {"data": "digits", "parameters": 46_000, "n_train": 9, "n_validation": 3, "n_test": 3, "rows": rows}
    runs = [{**common, "network": n, "seed": s, "seconds": {}, "notices": []} for n in NETWORKS for s in range(2)]
    return {"study": "antoran2022", "effort": "toy", "n_seeds": 2, "runs": runs}


def test_the_table_stands_beside_the_published_one(tmp_path: Path) -> None:
    record = made_up_table()
    assert antoran.claims(record)[0].found == "5 of 10"
    text = written("antoran2022", record, tmp_path)
    assert "5 of 10" in text and ".253 ± .001" in text and text.count("<svg") == 2
    table = markdown(antoran_report.scores(record, "nll")).splitlines()
    assert table[0] == "| evidence at | precisions | T-former | CNN | ResNet | Pre-ResNet | Fixup |"
    assert "0.500 ± 0.000" in table[5]
