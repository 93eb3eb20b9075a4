"""Scores against hand values, torchmetrics and scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from lapwing import metrics
from lapwing.errors import InputError, ShapeError


def random_classes(seed: int, n: int = 400, c: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(n, c, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]


@pytest.mark.parametrize("seed", range(5))
def test_accuracy_and_calibration_agree_with_torchmetrics(seed: int) -> None:
    probs, y = random_classes(seed)
    assert metrics.accuracy(probs, y) == pytest.approx(multiclass_accuracy(probs, y, 5, average="micro").item())
    for n_bins in (10, 15):
        theirs = multiclass_calibration_error(probs, y, 5, n_bins=n_bins, norm="l1").item()
        assert metrics.ece(probs, y, n_bins=n_bins) == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_auroc_agrees_with_scikit_learn_with_and_without_ties(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inside, outside = torch.randn(70, generator=generator), torch.randn(50, generator=generator) + 0.5
    labels = torch.cat([torch.zeros(70), torch.ones(50)])
    for a, b in [(inside, outside), (inside.round(), outside.round())]:
        assert metrics.auroc(a, b) == pytest.approx(roc_auc_score(labels, torch.cat([a, b])), abs=1e-12)


def test_auroc_counts_out_of_distribution_as_positive_and_ties_as_half() -> None:
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])
    assert metrics.auroc(low, high) == 1.0
    assert metrics.auroc(high, low) == 0.0
    assert metrics.auroc(torch.ones(3), torch.ones(4)) == 0.5
    assert metrics.auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0])) == 0.75


def test_brier_runs_from_zero_to_two() -> None:
    y = torch.tensor([0, 1])
    assert metrics.brier(torch.eye(2), y) == 0.0
    assert metrics.brier(torch.eye(2).flip(0), y) == 2.0
    assert metrics.brier(torch.tensor([[0.7, 0.3], [0.4, 0.6]]), y) == pytest.approx((2 * 0.09 + 2 * 0.16) / 2)


def test_brier_is_the_mean_squared_distance_to_the_label() -> None:
    probs, y = random_classes(0)
    by_hand = sum(((p - torch.eye(5)[k]) ** 2).sum().item() for p, k in zip(probs, y, strict=True)) / len(y)
    assert metrics.brier(probs, y) == pytest.approx(by_hand)


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_a_binary_prediction_stands_for_both_classes(shape: tuple[int, ...]) -> None:
    p, y = torch.tensor([0.9, 0.2, 0.6, 0.35]), torch.tensor([1.0, 0.0, 0.0, 1.0])
    stacked = torch.stack([1 - p, p], -1)
    for score in (metrics.accuracy, metrics.brier, metrics.ece):
        assert score(p.reshape(shape), y) == pytest.approx(score(stacked, y.long()))
    assert metrics.accuracy(p, y) == 0.5
    assert metrics.ece(p, y) == pytest.approx((0.1 + 0.2 + 0.6 + 0.65) / 4, abs=1e-7)


def test_a_confidence_on_an_edge_belongs_to_the_bin_below() -> None:
    probs = torch.tensor([[0.8, 0.2], [0.8, 0.2], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    bins = metrics.reliability(probs, torch.tensor([0, 1, 0, 0]), n_bins=10)
    assert bins.count == (0, 0, 0, 0, 1, 0, 0, 2, 0, 1)
    assert bins.accuracy[7] == 0.5
    assert bins.confidence[7] == pytest.approx(0.8)
    assert math.isnan(bins.accuracy[0])
    assert (bins.lower[7], bins.upper[7]) == (0.7, 0.8)


def test_nll_is_the_mean_and_does_not_underflow() -> None:
    assert metrics.nll(torch.tensor([-1.0, -2000.0])) == 1000.5


def test_regression_scores() -> None:
    mean, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[3.0], [5.0]])
    assert metrics.rmse(mean, y) == pytest.approx(math.sqrt(12.5))
    assert metrics.coverage(mean - 3, mean + 3, y) == 0.5


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: metrics.accuracy(torch.randn(3, 2), torch.zeros(3)), InputError, "not logits"),
        (lambda: metrics.accuracy(torch.full((3, 2), float("nan")), torch.zeros(3)), InputError, "sum to one"),
        (lambda: metrics.accuracy(torch.full((3, 2), 0.5), torch.zeros(2)), ShapeError, "one label per row"),
        (lambda: metrics.accuracy(torch.full((3, 2), 0.5), torch.tensor([0, 1, 2])), InputError, "from 0 to 1"),
        (lambda: metrics.accuracy(torch.zeros(0, 2), torch.zeros(0)), ShapeError, "N ≥ 1"),
        (lambda: metrics.brier(torch.full((3, 2), 0.5), torch.tensor([0.5, 0, 1])), InputError, "whole class labels"),
        (lambda: metrics.ece(torch.full((3, 2), 0.5), torch.zeros(3), n_bins=0), InputError, "n_bins"),
        (lambda: metrics.auroc(torch.zeros(0), torch.zeros(2)), ShapeError, "scores_id"),
        (lambda: metrics.auroc(torch.zeros(2), torch.tensor([float("nan")])), InputError, "scores_ood"),
        (lambda: metrics.rmse(torch.zeros(3), torch.zeros(3, 1)), ShapeError, "same non-empty shape"),
        (lambda: metrics.nll(torch.zeros(0)), InputError, "empty"),
    ],
)
def test_bad_inputs_are_refused_in_words(call, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
