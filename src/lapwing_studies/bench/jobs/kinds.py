"""Log densities of a network's outputs, implemented here so that all methods are scored in the same way."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class Kind(ABC):
    """`scale` is the recalibrated number: the temperature of a classifier, the noise in regression."""

    @abstractmethod
    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Mean training loss of a batch."""

    @abstractmethod
    def log_density(self, f: Tensor, y: Tensor, scale: float) -> Tensor:
        """One entry per likelihood term."""

    @abstractmethod
    def trained_scale(self, f: Tensor, y: Tensor) -> float:
        """The scale without held-out data; f and y are those of the training rows."""

    @abstractmethod
    def best_scale(self, f: Tensor, y: Tensor) -> float:
        """The scale with the least NLL on these rows."""


@dataclass(frozen=True)
class Classes(Kind):
    """softmax(f / T) along axis 1; with `one_logit`, the sigmoid of a single logit."""

    one_logit: bool = False

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return -self.log_density(f, y, 1.0).mean()

    def log_density(self, f: Tensor, y: Tensor, scale: float) -> Tensor:
        if self.one_logit:
            return -F.binary_cross_entropy_with_logits(f[:, 0] / scale, y.to(f), reduction="none")
        return -F.cross_entropy(f / scale, y, reduction="none")

    def trained_scale(self, f: Tensor, y: Tensor) -> float:
        return 1.0

    def best_scale(self, f: Tensor, y: Tensor) -> float:
        """T in [0.1, 10]: the NLL is convex in 1/T, so a ternary search on log T finds its minimum. Without errors in
        the rows, T would go to zero; the bound prevents that."""

        def nll(log_t: float) -> float:
            return -float(self.log_density(f.double(), y, math.exp(log_t)).mean())

        low, high = math.log(0.1), math.log(10)
        for _ in range(60):
            third = (high - low) / 3
            low, high = (low, high - third) if nll(low + third) < nll(high - third) else (low + third, high)
        return math.exp((low + high) / 2)


@dataclass(frozen=True)
class Numbers(Kind):
    """N(f, σ²); the densities are those of the standardised targets."""

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f, y)

    def log_density(self, f: Tensor, y: Tensor, scale: float) -> Tensor:
        return -0.5 * ((f - y) / scale).square() - math.log(scale) - 0.5 * math.log(2 * math.pi)

    def trained_scale(self, f: Tensor, y: Tensor) -> float:
        return self.best_scale(f, y)

    def best_scale(self, f: Tensor, y: Tensor) -> float:
        return float((f - y).double().square().mean().sqrt())


def mixture_nll(kind: Kind, members: Sequence[tuple[Tensor, float]], y: Tensor) -> float:
    """−log (1/M) Σₘ p(y | fₘ, scaleₘ), the mean over terms; members are (f, scale)."""
    terms = torch.stack([kind.log_density(f.double(), y, scale) for f, scale in members])
    return -float((terms.logsumexp(0) - math.log(len(members))).mean())
