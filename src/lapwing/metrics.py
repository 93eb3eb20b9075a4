"""Metrics of predictions against targets.

Every metric is a Python float computed in float64. Class probabilities are (N, C) with rows that sum to one. A binary
prediction may be given as the probability p of class 1, of shape (N,) or (N, 1); it is expanded to (1 − p, p).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InputError, ShapeError


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Fraction of points whose most probable class equals the label."""
    probs, y = _classes(probs, y)
    return (probs.argmax(-1) == y).double().mean().item()


def nll(log_prob: Tensor) -> float:
    """Mean negative log-likelihood of the targets, −(1/N) Σ log p(yₙ | xₙ), in nats.

    Takes log densities (`Prediction.log_prob(y)`), not probabilities: the probability of a confident mistake would
    underflow to 0, whose log is −∞. Works for classification, counts and regression alike.
    """
    if log_prob.numel() == 0:
        raise InputError("nll needs at least one log density, got an empty tensor. Check the held-out data.")
    return -log_prob.double().mean().item()


def brier(probs: Tensor, y: Tensor) -> float:
    """Brier score, (1/N) Σₙ Σ_c (p_nc − 1[yₙ = c])², between 0 and 2; a binary prediction counts both classes."""
    probs, y = _classes(probs, y)
    one_hot = torch.nn.functional.one_hot(y, probs.shape[-1]).double()
    return (probs - one_hot).square().sum(-1).mean().item()


@dataclass(frozen=True)
class Reliability:
    """Reliability diagram: confidence and accuracy in equal-width bins (lo, hi]; empty bins have count 0 and NaN."""

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    count: tuple[int, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]


def reliability(probs: Tensor, y: Tensor, *, n_bins: int = 10) -> Reliability:
    """Mean confidence (largest probability) and accuracy of the points in each of `n_bins` bins of confidence."""
    probs, y = _classes(probs, y)
    confidence, label = probs.max(-1)
    edges = _edges(n_bins)
    # bucketize without right=True returns the first edge ≥ confidence, so bins are (lo, hi].
    bin_of = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(bin_of, minlength=n_bins)
    mean_confidence = torch.bincount(bin_of, weights=confidence, minlength=n_bins) / count
    mean_accuracy = torch.bincount(bin_of, weights=(label == y).double(), minlength=n_bins) / count
    return Reliability(
        lower=tuple(edges[:-1].tolist()),
        upper=tuple(edges[1:].tolist()),
        count=tuple(count.tolist()),
        confidence=tuple(mean_confidence.tolist()),
        accuracy=tuple(mean_accuracy.tolist()),
    )


def ece(probs: Tensor, y: Tensor, *, n_bins: int = 10) -> float:
    """Expected calibration error, Σ_b (|B_b| / N) |accuracy_b − confidence_b|, over the bins of `reliability`.

    The value depends on the number of bins, so report `n_bins` with it. Published results use 10 or 15 bins.
    """
    bins = reliability(probs, y, n_bins=n_bins)
    # Accuracy and confidence of empty bins are NaN; their weight is zero, so leave them out.
    filled = [(n, abs(a - c)) for n, a, c in zip(bins.count, bins.accuracy, bins.confidence, strict=True) if n]
    return sum(n * gap for n, gap in filled) / sum(bins.count)


def auroc(scores_id: Tensor, scores_ood: Tensor) -> float:
    """Area under the ROC curve of out-of-distribution detection, P(score_ood > score_id) + ½ P(tie).

    Out-of-distribution inputs are the positive class. Computed as the Mann–Whitney statistic from mid-ranks,
    U / (n m) with U = Σ rank(ood) − n(n + 1)/2, in O((n + m) log(n + m)).
    """
    _check_scores(scores_id, "scores_id")
    _check_scores(scores_ood, "scores_ood")
    n, m = len(scores_ood), len(scores_id)
    _, which, count = torch.unique(torch.cat([scores_ood, scores_id]).double(), return_inverse=True, return_counts=True)
    mid_rank = count.cumsum(0).double() - (count.double() - 1) / 2  # ranks start at one; ties share their mean rank
    u = mid_rank[which[:n]].sum() - n * (n + 1) / 2
    return (u / (n * m)).item()


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root mean squared error over all points and outputs."""
    _check_same(mean, y, "mean")
    return (mean.double() - y.double()).square().mean().sqrt().item()


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """Fraction of targets inside [lower, upper]; 0.95 for a calibrated 95% interval."""
    _check_same(lower, y, "lower")
    _check_same(upper, y, "upper")
    return ((lower <= y) & (y <= upper)).double().mean().item()


def _classes(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Validate; return probabilities as (N, C) in float64 and labels as (N,) int64."""
    probs = probs.double()
    if probs.ndim == 1:
        probs = probs[:, None]
    if probs.ndim != 2 or len(probs) == 0:
        raise ShapeError(
            f"probs must be (N, C), (N, 1) or (N,) with N ≥ 1, got {tuple(probs.shape)}. Flatten other sites first."
        )
    if probs.shape[-1] == 1:
        probs = torch.cat([1 - probs, probs], -1)
    # 1e-4 allows for the rounding of float32 probabilities summed over many classes. `not (… < tol)` also rejects NaN.
    if not bool(((probs >= 0).all(-1) & ((probs.sum(-1) - 1).abs() < 1e-4)).all()):
        raise InputError("probs must be non-negative and sum to one in every row. Pass probabilities, not logits.")
    y = y[:, 0] if y.ndim == 2 and y.shape[-1] == 1 else y
    if y.shape != probs.shape[:1]:
        raise ShapeError(f"y must hold one label per row of probs, ({len(probs)},), got {tuple(y.shape)}.")
    labels = y.long()
    if not bool(((labels == y) & (labels >= 0) & (labels < probs.shape[-1])).all()):
        raise InputError(f"y must hold whole class labels from 0 to {probs.shape[-1] - 1}, got {y.min()} to {y.max()}.")
    return probs, labels


def _edges(n_bins: int) -> Tensor:
    """Edges of equal-width bins, as k / n: with linspace 0.3 would not equal the literal 0.3, and change bins."""
    if n_bins < 1:
        raise InputError(f"n_bins must be at least 1, got {n_bins}.")
    return torch.arange(n_bins + 1, dtype=torch.float64) / n_bins


def _check_scores(scores: Tensor, name: str) -> None:
    if scores.ndim != 1 or len(scores) == 0:
        raise ShapeError(f"{name} must be (N,) with N ≥ 1, one score per input, got {tuple(scores.shape)}.")
    if not bool(scores.isfinite().all()):
        raise InputError(f"{name} holds NaN or infinite scores: they have no rank. Check the predictions.")


def _check_same(a: Tensor, y: Tensor, name: str) -> None:
    """Require equal shapes: broadcasting (N, 1) against (N,) would compare every point with every other."""
    if a.shape != y.shape or a.numel() == 0:
        raise ShapeError(f"{name} and y must have one same non-empty shape, got {tuple(a.shape)} and {tuple(y.shape)}.")
