"""Regression on standard and gap splits: its methods against closed forms, its claims, and its page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lapwing_studies.reproduce import uci_regression as study_module
from lapwing_studies.reproduce import uci_regression_claims as counted
from lapwing_studies.reproduce.effort import FULL, QUICK, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.parts import Split
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.uci_regression_methods import RATIOS, Task, _fitted
from study_pages import page_of, written


def task(n: int = 60) -> Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    y = x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=generator)
    return Task(Split(x[:-20], y[:-20]), Split(x[-20:], y[-20:]), spread=2.0, seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty rows for every set, two splits of each kind."""
    random = np.random.RandomState(0)
    arrays = {}
    for name in (*study_module.SMALL, *study_module.LARGE):
        x = random.randn(40, 3).astype("float32")
        arrays |= {f"{name}_x": x, f"{name}_y": (x[:, 0] + 0.1 * random.randn(40)).astype("float32")}
        for kind in ("std", "gap"):
            order = np.stack([random.permutation(40) for _ in range(2)]).astype("int32")
            arrays |= {f"{name}_{kind}_train_idx": order[:, :30], f"{name}_{kind}_test_idx": order[:, 30:]}
    np.savez(tmp_path / "uci_regression.npz", **arrays)
    return tmp_path


def test_two_networks_side_by_side_go_the_way_they_would_go_alone() -> None:
    both = task()
    (whole, noise), (partial, _) = both.trained(20)
    (alone, alone_noise), _ = Task(both.kept, both.test, 2.0, 0).trained(20)
    for p, q in zip(partial.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-5)
    assert alone_noise != noise
    assert any(not torch.equal(p, q) for p, q in zip(whole.parameters(), partial.parameters(), strict=True))


def test_the_validation_grid_has_the_best_noise_in_closed_form() -> None:
    some = task()
    _, (partial, _) = some.trained(50)
    unit = _fitted(partial, some.kept, "full", 1.0, 1.0)
    nll, ratio, var = some._at_ratio(unit, 0.3)

    def held_out(noise_var: float) -> float:
        posterior = _fitted(partial, some.kept, "full", math.sqrt(noise_var), ratio / noise_var)
        return -float(posterior.predict(some.held_out.x).log_prob(some.held_out.y).mean())

    assert held_out(var) == pytest.approx(nll + 0.5 + 0.5 * math.log(2 * math.pi), abs=1e-4)
    assert held_out(var) < min(held_out(1.2 * var), held_out(var / 1.2))
    chosen = some.by_validation(partial, partial, "full")
    ratios = float(chosen.prior.precisions[0]) * float(chosen.likelihood.noise_std[0]) ** 2  # type: ignore[attr-defined]
    assert min(abs(ratios / r - 1) for r in RATIOS) < 1e-4


def test_scores_are_in_the_units_of_the_target() -> None:
    some = task()
    (model, _), _ = some.trained(20)
    score = some.plain(model, 0.5, "evidence")
    with torch.no_grad():
        residual = 2.0 * (model(some.test.x) - some.test.y).double()
    assert score["rmse"] == pytest.approx(float(residual.square().mean().sqrt()))
    normal = torch.distributions.Normal(0.0, 2.0 * 0.5)
    assert score["ll"] == pytest.approx(float(normal.log_prob(residual).mean()))


def test_every_tier_has_its_splits(folder: Path, tmp_path: Path) -> None:
    jobs = study_module.jobs(Study(DataFolder(folder), Store(tmp_path), FULL, n_seeds=20))
    names = {(job.set_name, job.kind, job.number) for job in jobs}
    assert len(names) == len(jobs) == 2 * (5 + 5 + 1)  # there are two splits
    assert ("naval", "gap", 1) in names and ("naval", "std", 0) not in names


def test_a_stopped_study_goes_on_and_its_page_can_be_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "SMALL", ("yacht", "energy"))
    study = Study(DataFolder(folder), Store(tmp_path / "out"), TOY, n_seeds=1)
    with pytest.warns(UserWarning, match="epochs"):  # mean field in five steps
        record = study_module.run(study)
    with monkeypatch.context() as patched:
        patched.setattr(study_module.SplitJob, "run", None)
        assert study_module.run(study) == record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert len(record["runs"]) == 5 and len(record["runs"][0]["scores"]) == 11
    text = written("uci-regression", record, tmp_path)
    assert text.count('role="img"') == 4


def record(linear: float, sampled: float, plain: float, mean_field: float) -> Record:
    by = {("MAP", plain), ("linearised full", linear), ("sampled", sampled)}
    scores = [Record(method=m, by=tuning, rmse=1.0, ll=v) for m, v in by for tuning in ("evidence", "validation")]
    scores.append(Record(method="mean field", by="ELBO", rmse=1.0, ll=mean_field))
    kinds = [(name, "std") for name in study_module.SMALL] + [(name, "gap") for name in study_module.GAPS]
    runs = [Record(name=n, kind=k, split=0, seconds=1.0, scores=scores) for n, k in kinds]
    return Record(study="uci-regression", effort="full", n_seeds=1, steps=1, runs=runs)


def test_claims_hold_when_they_hold_and_fail_when_they_fail() -> None:
    good, bad = record(-1.0, -2.0, -1.5, -3.0), record(-1.0, -0.5, -0.5, -1.5)
    assert [claim.holds for claim in counted.claims(good)] == [True] * 8
    assert [claim.holds for claim in counted.claims(bad)] == [False] * 4 + [True, False] * 2


@pytest.mark.slow
def test_the_quick_tier_runs(folder: Path, tmp_path: Path) -> None:
    found = study_module.run(Study(DataFolder(folder), Store(tmp_path / "out"), QUICK, n_seeds=1))
    assert len(found["runs"]) == 11 and len(counted.claims(found)) == 8
    assert page_of("uci-regression", found).tables
