"""Table 1 and figures 3 and 4 of Immer et al. (2021): data, training, scores and pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.errors import InputError
from lapwing_studies.report import immer as report
from lapwing_studies.report.study import markdown
from lapwing_studies.reproduce import banana, immer, immer_claims, immer_methods, step, uci
from lapwing_studies.reproduce.architectures import mlp, seeded
from lapwing_studies.reproduce.effort import FULL, QUICK, TOY
from lapwing_studies.reproduce.folder import DataFolder
from lapwing_studies.reproduce.many import LEARNING_RATE, train_many
from lapwing_studies.reproduce.means import standard_error
from lapwing_studies.reproduce.parts import Split
from lapwing_studies.reproduce.published import IMMER_2021
from lapwing_studies.reproduce.store import Store
from lapwing_studies.reproduce.study import Study, done
from study_pages import page_of, written


def folder(path: Path, n_classes: int = 3) -> DataFolder:
    """An archive with one made-up set under the name of glass, in two splits."""
    generator = np.random.default_rng(0)
    y = (np.arange(40) % n_classes).astype(np.uint8)
    x = (generator.normal(size=(40, 2)) + y[:, None]).astype(np.float32)
    rows = np.stack([generator.permutation(40) for _ in range(2)]).astype(np.int32)
    parts = {"train": rows[:, :24], "valid": rows[:, 24:32], "test": rows[:, 32:]}
    arrays = {f"glass_{part}_idx": index for part, index in parts.items()}
    np.savez(path / "uci_classification.npz", glass_x=x, glass_y=y, **arrays)
    return DataFolder(path)


def study(path: Path, effort: Any = TOY, n: int = 2) -> Study:
    return Study(folder(path), Store(path / "out"), effort, n)


# --- protocol --------------------------------------------------------------------------------------------------


def test_the_published_protocol() -> None:
    np.testing.assert_allclose(immer_methods.GRID, np.logspace(-2, 2, 10), rtol=1e-12)
    np.testing.assert_allclose(immer_methods.COARSE, [0.0774, 0.599, 4.64, 35.9], rtol=2e-3)
    np.testing.assert_allclose(immer_methods.UPPER, [0.599, 1.67, 4.64, 12.9, 35.9, 100], rtol=3e-3)
    assert uci.SEEDS == (711, 1, 75, 359, 17, 420, 129, 666, 69, 36)
    assert set(IMMER_2021) == set(uci.NAMES)
    assert all(len(row) == 7 for row in IMMER_2021.values())


def test_splits_are_standardised_by_their_training_rows(tmp_path: Path) -> None:
    data = uci.split(folder(tmp_path), "glass", 1)
    assert (len(data.train), len(data.validation), len(data.test)) == (24, 8, 8)
    torch.testing.assert_close(data.train.x.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.train.x.std(0, correction=0), torch.ones(2))
    assert data.widths == (2, 50, 50, 3)
    assert data.likelihood == "classification"
    with pytest.raises(InputError, match="2 splits; split 2 was asked for"):
        uci.split(folder(tmp_path), "glass", 2)


def test_two_classes_have_one_output(tmp_path: Path) -> None:
    data = uci.split(folder(tmp_path, 2), "glass", 0)
    assert data.widths == (2, 50, 50, 1)
    assert data.likelihood == "binary"


@pytest.mark.parametrize("n_classes", [2, 3])
def test_networks_side_by_side_go_the_way_they_would_go_alone(n_classes: int, tmp_path: Path) -> None:
    data = uci.split(folder(tmp_path, n_classes), "glass", 0)
    precisions = torch.tensor([0.1, 10.0])
    together = train_many(data.widths, data.train, data.summed_loss, precisions, n_epochs=7, seed=3)
    alone = seeded(lambda: mlp(data.widths, nn.Tanh), seed=3)
    optimiser = torch.optim.Adam(alone.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 7)
    for _ in range(7):
        optimiser.zero_grad()
        f, y = alone(data.train.x), data.train.y
        if n_classes == 2:
            loss = nn.functional.binary_cross_entropy_with_logits(f[:, 0], y.float(), reduction="sum")
        else:
            loss = nn.functional.cross_entropy(f, y, reduction="sum")
        (loss + 5 * sum(p.square().sum() for p in alone.parameters())).backward()
        optimiser.step()
        schedule.step()
    for p, q in zip(together[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_large_sets_are_left_out_of_a_quick_run(tmp_path: Path) -> None:
    assert immer.n_splits(study(tmp_path, QUICK, 3), "glass") == 3
    assert immer.n_splits(study(tmp_path, QUICK, 3), "satellite") == 0
    assert immer.n_splits(study(tmp_path, QUICK, 20), "vehicle") == 10


def test_a_study_that_is_stopped_has_an_even_table(tmp_path: Path) -> None:
    """A split of every set by every method, then the next split; the large sets after the others."""
    listed = [(job.number, job.set_name, job.part) for job in immer.jobs(study(tmp_path, FULL, 10))]
    assert len(listed) == len(set(listed)) == 80 * 6 - 20  # no GLM mode on the large sets
    small = [name for name in uci.NAMES if name not in uci.LARGE]
    assert listed[:24] == [(0, name, part) for name in small for part in immer.FIRST]
    assert {number for number, name, _ in listed[:240] if name == "waveform"} == set(range(10))
    assert {name for _, name, _ in listed[240:320]} == set(uci.LARGE)
    assert {part for *_, part in listed[320:380]} == set(immer.LAST)
    assert {part for *_, part in listed[380:]} == set(immer.MEAN_FIELD)
    assert {*immer.FIRST, *immer.LAST, *immer.MEAN_FIELD} == set(immer.PARTS)


def test_variational_posteriors_are_fitted_where_they_may_be_chosen(tmp_path: Path) -> None:
    def tried(n_classes: int, what: str) -> list[str]:
        (path := tmp_path / f"{n_classes}").mkdir(exist_ok=True)
        data = uci.split(folder(path, n_classes), "glass", 0)
        cases = [immer_methods.Case(data, mlp(data.widths, nn.Tanh), precision) for precision in immer_methods.GRID]
        return [f"{case.precision:.3g}" for case in cases if getattr(case, what)]

    assert tried(2, "variational") == ["0.599", "1.67", "4.64", "12.9", "35.9", "100"]
    assert tried(3, "variational") == ["1.67", "4.64", "12.9", "35.9"]
    assert tried(3, "functional") == ["0.599", "1.67", "4.64", "12.9", "35.9", "100"]


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    """Every split is written at once when it is done, and never computed again."""
    made = study(tmp_path)
    calls: list[int] = []

    class Job:
        made_with = "the same"

        def __init__(self, number: int) -> None:
            self.number, self.name = number, f"split-{number}"

        def run(self) -> int:
            calls.append(self.number)
            if self.number == 1 and calls.count(1) == 1:
                raise KeyboardInterrupt
            return self.number

    with pytest.raises(KeyboardInterrupt):
        done(made, [Job(0), Job(1)])
    assert done(made, [Job(0), Job(1)]) == [0, 1]
    assert calls == [0, 1, 1]
    assert not list((tmp_path / "out").rglob("*.part"))


@pytest.mark.slow
def test_every_method_scores_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immer_methods, "N_SAMPLES", 20)
    found = [immer.ImmerJob("glass", 0, part, study(tmp_path)).run() for part in immer.PARTS]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    methods = {score["method"] for run in found for score in run["scores"]}
    assert methods == set(report.METHODS)
    assert len(list((tmp_path / "out" / "weights").iterdir())) == 10


# --- the table -------------------------------------------------------------------------------------------------


def made_up(method: str, precision: float, validation: float, nll: float) -> Any:
    return {"method": method, "precision": precision, "validation": validation, "nll": nll, "accuracy": 0.9, "ece": 0.1}


def record() -> Any:
    """Two splits of every set; the better validation NLL belongs to other precisions in each."""
    runs = []
    for name in uci.NAMES:
        for number, seed in enumerate(uci.SEEDS[:2]):
            scores = []
            for method in report.METHODS:
                level = {"BNN": 0.6, "GLM diag": 0.5, "GLM mode": 0.25}.get(method, 0.3)
                scores += [made_up(method, 1.0, 0.1 + 0.2 * number, level), made_up(method, 4.0, 0.2, level + 0.1)]
            head = {"name": name, "seed": seed, "part": "plain", "weights": 9, "largest_gradient": 0.1, "seconds": 1.0}
            runs.append({**head, "scores": scores})
    return {"study": "immer2021-uci", "effort": "toy", "n_seeds": 2, "runs": runs}


def test_every_method_takes_the_precision_with_the_best_validation_nll() -> None:
    by_split = immer_claims.chosen_by_split(record(), "glass", "GLM")
    assert [s["precision"] for s in by_split] == [1.0, 4.0]
    assert {s["precision"] for s in immer_claims.chosen_together(record(), "glass", "GLM")} == {1.0}
    assert standard_error([s["nll"] for s in by_split]) == pytest.approx(0.05)
    assert "0.350 ± 0.050" in markdown(report.nll_table(record(), immer_claims.chosen_by_split, "nll", "NLL"))


def test_claims_count_sets() -> None:
    found = [claim.found for claim in immer_claims.claims(record())]
    assert found[:5] == ["8 of 8", "32 of 32 cases", "8 of 8", "4 of 4", "8 of 8"]
    partial = record()
    for run in partial["runs"][:3]:  # both splits of one set, one of the next
        run["scores"] = [score for score in run["scores"] if score["method"] != "GLM refine"]
    assert immer_claims.claims(partial)[4].found == "7 of 7"
    near = immer_claims.near(record(), immer_claims.COMPARED)
    assert len(near) == 32 and 0 < sum(near) < 32
    worse = record()
    for run in worse["runs"]:
        for score in run["scores"]:
            score["nll"] *= 9 if score["method"].startswith("GLM") else 1
    assert [claim.holds for claim in immer_claims.claims(worse)[:2]] == [False, False]


def test_the_page_stands_beside_the_published_table(tmp_path: Path) -> None:
    page, text = page_of("immer2021-uci", record()), written("immer2021-uci", record(), tmp_path)
    assert "8 of 8" in text
    assert "0.335 ± 0.004" in text  # waveform as published
    assert len(markdown(page.tables[1]).splitlines()) == 10
    partial = record()
    for run in partial["runs"]:
        run["scores"] = [score for score in run["scores"] if score["method"] != "GLM mode"]
    columns = [table.columns for table in report.page(partial).tables[::2]]
    assert columns == [("set", "splits", *(m for m in report.METHODS if m != "GLM mode"))] * 2


# --- figures ---------------------------------------------------------------------------------------------------


def test_the_step_has_its_worked_values() -> None:
    model, exact = step.trained(), step.Exact.of(401)
    posterior = lw.fit(model, step.data(), "binary", structure="full", prior=1.0)
    assert float(posterior.mean[0]) == pytest.approx(0.633059, abs=1e-5)
    assert posterior.precision.to_dense().diagonal().tolist() == pytest.approx([3.019755, 2.564434], abs=1e-4)
    assert exact.log_evidence == pytest.approx(-1.580249, abs=1e-4)
    assert float(posterior.log_evidence()) == pytest.approx(-1.418702, abs=1e-5)
    x = torch.tensor([[0.5], [1.0], [2.0], [4.0]], dtype=torch.float64)
    assert exact.predict(x).tolist() == pytest.approx([0.766056, 0.918048, 0.982217, 0.991550], abs=1e-4)
    assert posterior.predict(x, link="quadrature").probs.flatten().tolist() == pytest.approx(
        [0.665768, 0.794611, 0.953675, 0.992562], abs=1e-4
    )
    sampled = posterior.predict(x, predictive="bnn", n_samples=1000)
    assert sampled.probs.flatten().tolist() == pytest.approx([0.654421, 0.747587, 0.817887, 0.847504], abs=0.03)


@pytest.mark.slow
def test_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "N_SAMPLES", 20)
    monkeypatch.setattr(step, "N_GRID", 101)
    monkeypatch.setattr(banana, "N_GRID", 7)
    plain = Study(DataFolder(None), Store(tmp_path), TOY, 1)
    for found in (step.run(plain), banana.run(plain)):
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert "<svg" in written(found["study"], found, tmp_path)


def test_made_up_bananas_are_two_bent_clouds() -> None:
    x, y = banana.synthetic(300, seed=0)
    assert (x.shape, int(y.sum())) == ((300, 2), 150)
    assert Split(x, y).rows(slice(0, 3)).x.shape == (3, 2)
    assert x[y == 0, 1].mean() > x[y == 1, 1].mean()


def test_mean_field_is_fitted_with_the_prior_of_its_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a huge precision every weight goes back to the prior, and the predictions to the class shares."""
    monkeypatch.setattr(immer_methods, "MEAN_FIELD_STEPS", 300)
    data = uci.split(folder(tmp_path, 3), "glass", 0)
    torch.manual_seed(0)
    model = mlp(data.widths, nn.Tanh)
    before = [p.clone() for p in model.parameters()]
    ((name, log_probs),) = immer_methods.mean_field(immer_methods.Case(data, model, 1e6))
    assert name == "MFVI" and log_probs.shape == (len(data.held_out), 3)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert float(log_probs.exp().std(0).max()) < 0.05
    assert list(immer_methods.mean_field(immer_methods.Case(data, model, 0.01))) == []
