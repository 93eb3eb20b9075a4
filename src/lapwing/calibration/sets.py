"""Split conformal prediction on a posterior: intervals and label sets whose coverage is exact by exchangeability.

Intervals are scaled by the posterior's own standard deviation (normalised scores: Lei, G'Sell, Rinaldo, Tibshirani and
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
    """`interval` = (low, high), each in the shape of the targets; `prediction` is the posterior's own."""

    interval: tuple[Tensor, Tensor]
    prediction: RegressionPrediction


@dataclass(frozen=True, eq=False)
class LabelSets:
    """`labels[i, c]`: whether class c is in the set of input i; `prediction` is the posterior's own."""

    labels: Bool[Tensor, "b c"]
    prediction: ClassPrediction


@dataclass(frozen=True, eq=False)
class Conformal:
    """Prediction sets that hold the target of a new datum with probability ≥ `level`.

    The probability is over the held-out data and the new datum together, which have to be exchangeable. It is
    `coverage` = ⌈(n + 1) level⌉ / (n + 1) exactly where no two scores are equal.
    """

    posterior: Posterior
    level: float
    scores: Float[Tensor, "n ..."] = field(repr=False)  # of the held-out data; larger is further from what was expected

    @property
    def n(self) -> int:
        """How many held-out data it was calibrated on."""
        return len(self.scores)

    @property
    def coverage(self) -> float:
        """⌈(n + 1) level⌉ / (n + 1); one where n is too small for the level, and every set holds everything."""
        return min(1.0, rank(self.n, self.level) / (self.n + 1))

    @cached_property
    def quantile(self) -> Tensor:
        """The score up to which a target is in the set; one for every output."""
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
    """Calibrate prediction sets on held-out data: whatever the posterior is like, they cover with probability ≥ level.

    Numbers and counts: the interval mean ± q · std around the posterior's prediction, with q the score |y − mean| / std
    of rank ⌈(n + 1) level⌉ among the n held-out data. Several outputs: each is covered with this probability, not all
    together. Classes: every label with probability p ≥ the p that the held-out label of this rank was given; the set
    may be empty, where no label is as probable as that.

    `held_out`: as for `lw.fit`, data that neither training nor tuning has seen. Fewer than level / (1 − level) of them
    (9 for 0.9, 19 for 0.95) cannot guarantee the level by anything finite: intervals are then infinite, and label
    sets hold every class. Rows labelled `ignore_index` are left out. Cost: one prediction of the held-out data.
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
    """−log p of every label: in the order of 1 − p, and told apart where p rounds to one."""
    log_probs = prediction.log_probs.detach().double()
    return -log_probs.reshape(len(log_probs), log_probs.shape[-1])
