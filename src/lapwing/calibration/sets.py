"""Split conformal prediction with a posterior: intervals and label sets with finite-sample coverage.

Intervals are scaled by the posterior's standard deviation (normalised scores: Lei, G'Sell, Rinaldo, Tibshirani and
Wasserman, "Distribution-free predictive inference for regression", 2018). Label sets are those of Sadinle, Lei and
Wasserman, "Least ambiguous set-valued classifiers with bounded error levels" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from lapwing._types import Bool, Float, Tensor
from lapwing.calibration.held_out import scored
from lapwing.calibration.order_statistics import quantile, rank
from lapwing.data import ModelInput
from lapwing.data.targets import encode_batch
from lapwing.errors import InputError, InputTypeError, NumericalError, ShapeError, StructureError
from lapwing.likelihoods import Bernoulli, Categorical, CustomLikelihood, Poisson
from lapwing.posterior import Posterior, predicted
from lapwing.predictive import ClassPrediction, Prediction, RegressionPrediction
from lapwing.runtime import distributed
from lapwing.runtime.sandbox import plain_tensors


@dataclass(frozen=True, eq=False)
class Intervals:
    """`interval` = (low, high), each in the shape of the targets; `prediction` is that of the posterior."""

    interval: tuple[Tensor, Tensor]
    prediction: RegressionPrediction


@dataclass(frozen=True, eq=False)
class LabelSets:
    """`labels[i, c]`: whether class c is in the set of input i; `prediction` is that of the posterior."""

    labels: Bool[Tensor, "b c"]
    prediction: ClassPrediction


@dataclass(frozen=True, eq=False)
class Conformal:
    """Prediction sets that contain the target of a new datum with probability ≥ `level`.

    The probability is over held-out data and new datum jointly, which must be exchangeable. It equals `coverage` =
    ⌈(n + 1) level⌉ / (n + 1) if there are no ties between scores.
    """

    posterior: Posterior
    level: float
    scores: Float[Tensor, "n ..."] = field(repr=False)  # of the held-out data; larger means less expected

    @property
    def n(self) -> int:
        """Number of held-out data it was calibrated on."""
        return len(self.scores)

    @property
    def coverage(self) -> float:
        """⌈(n + 1) level⌉ / (n + 1); 1 if n is too small for the level, and every set contains everything."""
        return min(1.0, rank(self.n, self.level) / (self.n + 1))

    @cached_property
    def quantile(self) -> Tensor:
        """The largest score that a set contains, for every output."""
        return quantile(self.scores, self.level)

    @plain_tensors()
    def predict(self, x: Any) -> Intervals | LabelSets:
        """Intervals mean ± q · std, or the labels with −log p ≤ q."""
        prediction = predicted(self.posterior, x)
        if isinstance(prediction, ClassPrediction):
            return LabelSets(_label_scores(prediction) <= self.quantile, prediction)
        assert isinstance(prediction, RegressionPrediction)
        half = self.quantile.to(prediction.std) * prediction.std
        return Intervals((prediction.mean - half, prediction.mean + half), prediction)

    def __repr__(self) -> str:
        return f"Conformal(level={self.level}, n={self.n}, coverage={self.coverage:.4f})"


@distributed.collective_call("lw.conformal")
@plain_tensors()
def conformal(posterior: Posterior, held_out: Any, level: float = 0.9, *, progress: bool | None = None) -> Conformal:
    """Calibrate prediction sets on held-out data: coverage is at least `level`, however good the posterior is.

    Regression and counts: the interval mean ± q · std of the posterior's prediction, where q is the score |y − mean| /
    std of rank ⌈(n + 1) level⌉ among the n held-out data. With several outputs, coverage holds for each, not jointly.
    Classification: all labels with probability p ≥ the probability of the held-out label of this rank. The set is
    empty if no label is that probable.

    `held_out`: as for `lw.fit`; data that neither training nor tuning has used. With fewer than level / (1 − level)
    data (9 for 0.9, 19 for 0.95) no finite set can guarantee the level: intervals are then infinite, and label sets
    contain every class. Rows labelled `ignore_index` are excluded. Cost: one prediction of the held-out data.
    """
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"conformal: expected a Posterior from lw.fit or lw.tune, got {type(posterior).__name__}.")
    _check(posterior, level)
    batches = posterior.batches(held_out, "held_out")
    scores = scored(batches, partial(_held_out_scores, posterior), progress=progress)
    if not len(scores):
        raise InputError("conformal: every held-out label is ignore_index, so there is nothing to calibrate on.")
    return Conformal(posterior, float(level), scores)


def _check(posterior: Posterior, level: float) -> None:
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise InputError(f"conformal: the level is a probability between 0 and 1, such as 0.9, got {level!r}.")
    likelihood, sites = posterior.likelihood, posterior.sites
    if isinstance(likelihood, CustomLikelihood):
        raise StructureError(
            "conformal: of a custom likelihood neither a standard deviation nor class probabilities are known. Use "
            "a built-in likelihood."
        )
    if isinstance(likelihood, Bernoulli) and sites.c > 1:
        raise StructureError(
            f"conformal: each datum has {sites.c} labels at once (multilabel), and a label set is about one. Calibrate "
            "each of them with a binary posterior of its own."
        )
    if isinstance(likelihood, Bernoulli | Categorical) and sites.t > 1:
        raise StructureError(
            f"conformal: each datum has {sites.t} labels, one per position. Data are exchangeable, positions within a "
            "datum are not, so one threshold for all positions would guarantee nothing. Use a model with one label per "
            "datum."
        )


def _held_out_scores(posterior: Posterior, x: ModelInput, y: Any) -> Float[Tensor, "n ..."]:
    """Nonconformity scores of a batch: −log p of the label, or |y − mean| / std."""
    if isinstance(y, tuple):
        what = "(counts, exposures)" if isinstance(posterior.likelihood, Poisson) else "a tuple"
        raise InputTypeError(f"conformal needs targets that are one tensor, but {what} came.")
    x, encoded = encode_batch(x, y, posterior.likelihood, posterior.sites)
    prediction = predicted(posterior, x)
    scores = _class_scores(posterior, prediction, encoded) if isinstance(prediction, ClassPrediction) else None
    scores = _number_scores(prediction, torch.as_tensor(y)) if scores is None else scores
    if not bool(torch.isfinite(scores).all()):
        raise NumericalError("conformal: a predictive standard deviation of zero leaves |y − mean| / std undefined.")
    return scores


def _number_scores(prediction: Prediction, y: Tensor) -> Float[Tensor, "n ..."]:
    """|y − mean| / std."""
    assert isinstance(prediction, RegressionPrediction)
    if y.numel() != prediction.mean.numel():
        raise ShapeError(f"conformal: {tuple(y.shape)} targets for predictions of {tuple(prediction.mean.shape)}.")
    mean, std = prediction.mean.detach().double(), prediction.std.detach().double()
    return (y.to(mean).reshape(mean.shape) - mean).abs() / std


def _class_scores(posterior: Posterior, prediction: ClassPrediction, labels: Tensor) -> Float[Tensor, " n"]:
    labels = labels.reshape(len(labels)).long().to(prediction.log_probs.device)
    if isinstance(posterior.likelihood, Categorical):
        counted = labels != posterior.likelihood.ignore_index
        return _label_scores(prediction)[counted].gather(-1, labels[counted, None])[:, 0]
    return _label_scores(prediction).gather(-1, labels[:, None])[:, 0]


def _label_scores(prediction: ClassPrediction) -> Float[Tensor, "b c"]:
    """−log p of every label: ordered like 1 − p, but distinct where p rounds to 1."""
    log_probs = prediction.log_probs.detach().double()
    return -log_probs.reshape(len(log_probs), log_probs.shape[-1])
