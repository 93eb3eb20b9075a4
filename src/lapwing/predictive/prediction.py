"""Predictions, with their uncertainty split into epistemic (model) and aleatoric (noise) parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.distributions import Bernoulli, Categorical, Distribution

from lapwing._types import Tensor
from lapwing.errors import InputError, NumericalError, StructureError
from lapwing.runtime.sandbox import plain_tensors


class Split(NamedTuple):
    """total = epistemic + aleatoric."""

    total: Tensor
    epistemic: Tensor
    aleatoric: Tensor


class Prediction(ABC):
    """A predictive distribution per datum (and per likelihood term of a datum)."""

    distribution: Distribution  # the predictive as a torch.distributions object

    def __getattr__(self, name: str) -> Any:
        """Raise an error that lists what this kind of prediction has."""
        if name.startswith("_"):
            raise AttributeError(name)
        has = sorted(n for n in {*dir(type(self)), *vars(self)} if not n.startswith("_"))
        raise AttributeError(f"{type(self).__name__} has no '{name}'; it has {', '.join(has)}.")

    @abstractmethod
    def log_prob(self, y: Any) -> Tensor:
        """log p(y | x, data) of targets given as for `fit`: one number per datum and term."""

    def checked(self) -> Prediction:
        """Itself; raises if a moment overflows."""
        return self


@dataclass(frozen=True, eq=False, repr=False)
class RegressionPrediction(Prediction):
    """Regression or count targets. All tensors have the targets' shape."""

    mean: Tensor
    epistemic: Tensor
    aleatoric: Tensor
    distribution: Distribution
    quantile: Callable[[float], Tensor]
    log_density: Callable[[Any], Tensor]

    @property
    def variance(self) -> Tensor:
        """Total variance of a target: epistemic + aleatoric."""
        return self.epistemic + self.aleatoric

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    def checked(self) -> Prediction:
        bad = ~torch.isfinite(self.variance)
        if bool(bad.any()):
            row = int(bad.reshape(len(bad), -1).any(-1).nonzero()[0])
            raise NumericalError(
                f"The predictive variance at input {row} is not a finite {self.variance.dtype}: the posterior leaves "
                "the outputs there so uncertain that their moments overflow. Use a larger prior precision "
                "(lw.tune finds one), or double precision (model.double())."
            )
        return self

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval (lower, upper) that contains a target with this probability."""
        if not 0 < level < 1:
            raise InputError(f"interval: the level is a probability between 0 and 1, got {level}.")
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    @plain_tensors()
    def log_prob(self, y: Any) -> Tensor:
        return self.log_density(y)

    def __repr__(self) -> str:
        """Number of targets, range of their standard deviations, and the epistemic share."""
        if not self.mean.numel():
            return f"RegressionPrediction: mean and std {tuple(self.mean.shape)}"
        share = (self.epistemic / self.variance).detach().mean()
        return (
            f"RegressionPrediction: mean and std {tuple(self.mean.shape)}; std {_span(self.std)}, "
            f"{float(share):.0%} of the variance epistemic"
        )


@dataclass(frozen=True, eq=False, repr=False)
class ClassPrediction(Prediction):
    """Class probabilities. `probs` has the model's output shape; uncertainties have one value per label.

    With p the probabilities under a draw of the weights and p̄ their mean:
    entropy H(p̄) = epistemic (mutual information of label and weights) + aleatoric E[H(p)], and per class
    p̄ − p̄² = Var p + E[p − p²] (Kwon et al., 2020).
    """

    log_probs: Tensor  # (..., K) over the possible values of a label, last axis
    expected_entropy: Tensor  # (...)
    expected_noise: Tensor  # (..., K): E[p − p²]
    arranged: Callable[[Tensor], Tensor]  # (..., K) → the model's output shape
    log_density: Callable[[Any], Tensor]
    binary: bool
    present: Tensor | None = None  # (n, T): positions that are not padding; None: all
    ignore_index: int = -100  # the label of padding

    @cached_property
    def probs(self) -> Tensor:
        return self.arranged(self.log_probs.exp())

    @property
    def label(self) -> Tensor:
        """The most probable label; `ignore_index` at padded positions."""
        label = self.log_probs.argmax(-1)
        return label if self.present is None else torch.where(self.present, label, self.ignore_index)

    @cached_property
    def entropy(self) -> Tensor:
        """H(p̄), in nats."""
        # entr(0) = 0, where p · log p would be NaN.
        return torch.special.entr(self.log_probs.exp()).sum(-1).clamp(min=0)  # p may round to slightly more than 1

    @cached_property
    def aleatoric(self) -> Tensor:
        # Closed-form links approximate p̄, whose entropy can then be slightly less than E[H(p)].
        return torch.minimum(self.expected_entropy, self.entropy)

    @cached_property
    def epistemic(self) -> Tensor:
        return self.entropy - self.aleatoric

    @cached_property
    def class_variance(self) -> Split:
        """Variance of the indicator of each class, split into epistemic and aleatoric parts."""
        p = self.log_probs.exp()
        total = p * (1 - p)
        aleatoric = torch.minimum(self.expected_noise, total)
        return Split(*(self.arranged(v) for v in (total, total - aleatoric, aleatoric)))

    @cached_property
    def distribution(self) -> Distribution:  # type: ignore[override]
        if self.present is not None:
            raise StructureError(
                "These data have different numbers of positions, and no distribution stands for a position that is not "
                "there. Use probs, label and log_prob(y) with `present`, or predict batch by batch."
            )
        if self.binary:
            return Bernoulli(probs=self.log_probs[..., 1].exp(), validate_args=False)
        return Categorical(logits=self.log_probs, validate_args=False)

    @plain_tensors()
    def log_prob(self, y: Any) -> Tensor:
        return self.log_density(y)

    def __repr__(self) -> str:
        """Shape, mean entropy, and its epistemic part."""
        return (
            f"ClassPrediction: probs {tuple(self.probs.shape)}; entropy {float(self.entropy.detach().mean()):.3g} nats "
            f"on average, {float(self.epistemic.detach().mean()):.3g} of it epistemic"
        )


@dataclass(frozen=True, eq=False, repr=False)
class DensityPrediction(Prediction):
    """For likelihoods known by their log density only: scores targets; `mean` exists if the likelihood defines one."""

    mean: Tensor | None
    log_density: Callable[[Any], Tensor]

    @property
    def distribution(self) -> Distribution:  # type: ignore[override]
        raise InputError("A custom likelihood has no torch.distributions object; use `log_prob(y)` to score targets.")

    @plain_tensors()
    def log_prob(self, y: Any) -> Tensor:
        return self.log_density(y)

    def __repr__(self) -> str:
        mean = "no mean" if self.mean is None else f"mean {tuple(self.mean.shape)}"
        return f"DensityPrediction: {mean}; log_prob(y) scores targets"


def _span(values: Tensor) -> str:
    return f"{float(values.detach().min()):.3g} to {float(values.detach().max()):.3g}"
