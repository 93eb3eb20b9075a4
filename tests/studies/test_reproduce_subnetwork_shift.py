"""Subnetworks under shift: the shifts, the baselines, the claims, and the page at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lapwing_studies.reproduce import subnetwork_shift as study_module
from lapwing_studies.reproduce.effort import QUICK, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.parts import Split
from lapwing_studies.reproduce.shifts import CORRUPTIONS, corrupted, rotated
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.subnetwork_baselines import convolutional, dense, dropout_draws, swag_draws
from study_pages import page_of, written


def images(n: int = 10, side: int = 8) -> torch.Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_quarter_turns_are_exact(turns: int) -> None:
    x = images()
    assert torch.allclose(rotated(x, 90.0 * turns), torch.rot90(x, turns, (2, 3)), atol=1e-12)


def test_corruptions_grow_with_severity_and_keep_their_seed() -> None:
    x = images(50, 16)
    assert torch.equal(corrupted(x, 0), x)
    assert torch.equal(corrupted(x, 3), corrupted(x, 3))
    for k in range(len(CORRUPTIONS)):
        distances = [float((corrupted(x, s) - x)[k :: len(CORRUPTIONS)].square().mean()) for s in (1, 3, 5)]
        assert 0 < distances[0] < distances[1] < distances[2], k


def test_a_blur_keeps_a_constant_image_and_occlusion_hides_a_square() -> None:
    flat = torch.ones(5, 3, 16, 16, dtype=torch.float64)
    found = corrupted(flat, 5)
    assert torch.allclose(found[1], flat[1]) and torch.allclose(found[2], flat[2])
    assert int((found[4, 0] == 0).sum()) == 8 * 8


def test_networks_have_the_shapes_they_need() -> None:
    assert dense(1, 12, 0.0)(torch.zeros(2, 1, 12, 12)).shape == (2, 10)
    assert convolutional(3, 32, 0.1)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert not any(isinstance(m, torch.nn.Dropout) for m in dense(1, 12, 0.0))


def test_baselines_leave_the_network_and_the_random_state_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    model, x = dense(1, 6, 0.5).eval(), torch.randn(30, 1, 6, 6, generator=generator)
    before, state = [p.clone() for p in model.parameters()], torch.random.get_rng_state()
    probs = dropout_draws(model, x, 5, generator)
    draws = swag_draws(model, Split(x, torch.arange(30) % 10), 4, seed=0)
    assert torch.equal(state, torch.random.get_rng_state()) and not model.training
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert torch.allclose(probs.sum(1), torch.ones(30, dtype=torch.float64))
    weights = [torch.nn.utils.parameters_to_vector(d.parameters()) for d in draws]
    assert len(draws) == 4 and not torch.equal(weights[0], weights[1])


def test_a_stopped_study_goes_on_and_its_page_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "ANGLES", (0, 60, 90))
    study = Study(DataFolder(None), Store(tmp_path / "out"), TOY, n_seeds=1)
    record = study_module.run(study)
    with monkeypatch.context() as patched:
        patched.setattr(study_module.ShiftJob, "run", None)
        assert study_module.run(study) == record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    methods = list(dict.fromkeys(row["method"] for row in record["runs"][0]["rows"]))
    others = ["MAP", "ensemble", "dropout", "SWAG", "diagonal"]
    assert methods == [*others, "subnetwork 10", "random subnetwork 10"]
    text = written("subnetwork", record, tmp_path)
    assert text.count('role="img"') == 4


def made_up(ours: float, theirs: float) -> Record:
    def row(method: str, level: int, ll: float) -> Record:
        return Record(method=method, level=level, error=0.5, ll=ll, brier=0.5, ece=0.1)

    others = ("MAP", "random subnetwork 10", "diagonal", "SWAG", "dropout", "ensemble")
    rows = [row("subnetwork 10", level, ours) for level in (0, 60, 120)]
    rows += [row(method, level, theirs if level else 9.0) for method in others for level in (0, 60, 120)]
    runs = [Record(kind="rotated", seed=0, seconds=1.0, precisions={}, rows=rows)]
    return Record(study="subnetwork", effort="quick", n_seeds=1, n_train=1, n_test=1, sizes=[10], runs=runs)


def test_claims_are_about_large_shifts() -> None:
    assert [c.holds for c in study_module.claims(made_up(-1.0, -2.0))] == [True] * 6 + [None] * 3
    assert [c.holds for c in study_module.claims(made_up(-2.0, -1.0))] == [False] * 6 + [None] * 3


@pytest.mark.slow
def test_the_quick_tier_runs_and_a_subnetwork_beats_the_network_under_shift(tmp_path: Path) -> None:
    record = study_module.run(Study(DataFolder(None), Store(tmp_path), QUICK, n_seeds=1))
    assert study_module.claims(record)[0].holds
    assert page_of("subnetwork", record).tables
