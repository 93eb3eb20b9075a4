"""Scores of predictions against targets.

Every score is a plain float computed in float64. Class probabilities are (N, C) with rows summing to one; a binary
prediction may be given as the probability of class 1, of shape (N,) or (N, 1), and is read as (1 − p, p).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import InputError, ShapeError


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Share of points whose most probable class is the observed one."""
    probs, y = _classes(probs, y)
    return (probs.argmax(-1) == y).double().mean().item()


def nll(log_prob: Tensor) -> float:
    """Mean negative log density of the observed targets, −(1/N) Σ log p(yₙ | xₙ), in nats.

    It takes log densities (`Prediction.log_prob(y)`), not probabilities: a confident mistake must not underflow to
    log 0. The same function scores classes, counts and regression.
    """
    if log_prob.numel() == 0:
        raise InputError("nll needs at least one log density, got an empty tensor. Check the held-out data.")
    return -log_prob.double().mean().item()


def brier(probs: Tensor, y: Tensor) -> float:
    """(1/N) Σₙ Σ_c (p_nc − 1[yₙ = c])², between 0 and 2; a binary prediction counts both of its classes."""
    probs, y = _classes(probs, y)
    observed = torch.nn.functional.one_hot(y, probs.shape[-1]).double()
    return (probs - observed).square().sum(-1).mean().item()


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy in equal-width bins (lo, hi]; an empty bin has count 0 and NaN means."""

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
    # (lo, hi]: the first edge that is not below the confidence closes the bin it falls into.
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

    The number depends on the bins: quote `n_bins` with it. Published tables of this field use 10 or 15.
    """
    bins = reliability(probs, y, n_bins=n_bins)
    filled = [(n, abs(a - c)) for n, a, c in zip(bins.count, bins.accuracy, bins.confidence, strict=True) if n]
    return sum(n * gap for n, gap in filled) / sum(bins.count)


def auroc(scores_id: Tensor, scores_ood: Tensor) -> float:
    """P(score_ood > score_id) + ½ P(tie): how well a score tells out-of-distribution inputs (the positive class).

    The Mann–Whitney statistic from mid-ranks, U = Σ rank(ood) − n(n + 1)/2 over n·m pairs: O((n + m) log(n + m)).
    """
    _check_scores(scores_id, "scores_id")
    _check_scores(scores_ood, "scores_ood")
    n, m = len(scores_ood), len(scores_id)
    _, which, count = torch.unique(torch.cat([scores_ood, scores_id]).double(), return_inverse=True, return_counts=True)
    mid_rank = count.cumsum(0).double() - (count.double() - 1) / 2  # ranks count from one; ties share their mean rank
    u = mid_rank[which[:n]].sum() - n * (n + 1) / 2
    return (u / (n * m)).item()


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root of the mean squared error over every point and output."""
    _check_same(mean, y, "mean")
    return (mean.double() - y.double()).square().mean().sqrt().item()


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """Share of targets inside [lower, upper]: a calibrated 95% interval covers 0.95 of them."""
    _check_same(lower, y, "lower")
    _check_same(upper, y, "upper")
    return ((lower <= y) & (y <= upper)).double().mean().item()


def _classes(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities as (N, C) in float64 and labels as (N,) integers, both checked."""
    probs = probs.double()
    if probs.ndim == 1:
        probs = probs[:, None]
    if probs.ndim != 2 or len(probs) == 0:
        raise ShapeError(
            f"probs must be (N, C), (N, 1) or (N,) with N ≥ 1, got {tuple(probs.shape)}. Flatten other sites first."
        )
    if probs.shape[-1] == 1:
        probs = torch.cat([1 - probs, probs], -1)
    # The tolerance is that of float32 probabilities summed over many classes; NaN fails the comparison too.
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
    """Edges of equal-width bins. k / n, not accumulated steps: 0.3 must be the float a user's 0.3 is."""
    if n_bins < 1:
        raise InputError(f"n_bins must be at least 1, got {n_bins}.")
    return torch.arange(n_bins + 1, dtype=torch.float64) / n_bins


def _check_scores(scores: Tensor, name: str) -> None:
    if scores.ndim != 1 or len(scores) == 0:
        raise ShapeError(f"{name} must be (N,) with N ≥ 1, one score per input, got {tuple(scores.shape)}.")
    if not bool(scores.isfinite().all()):
        raise InputError(f"{name} holds NaN or infinite scores: they have no rank. Check the predictions.")


def _check_same(a: Tensor, y: Tensor, name: str) -> None:
    """Never broadcast: (N, 1) against (N,) would compare every point with every other."""
    if a.shape != y.shape or a.numel() == 0:
        raise ShapeError(f"{name} and y must have one same non-empty shape, got {tuple(a.shape)} and {tuple(y.shape)}.")
