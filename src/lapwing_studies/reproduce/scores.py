"""Scores of a predictive method on test data and out-of-distribution inputs: NLL, calibration, detection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.reproduce.parts import Parts, Split

CHUNK = 250
N_LABELS = 10  # of a dyad


class ScoreRow(TypedDict):
    """`error`: the share of wrong labels, or the RMSE. `ece` in regression: that of ten central intervals."""

    method: str
    nll: float
    ece: float
    ood_auc: float
    error: float


@dataclass(frozen=True)
class Classes:
    """Class probabilities, and the log probability of the labels; the out-of-distribution score is the entropy."""

    probs: Tensor
    log_prob: Tensor
    outside: Tensor

    def score(self, method: str, y: Tensor) -> ScoreRow:
        return ScoreRow(
            method=method,
            nll=metrics.nll(self.log_prob),
            ece=metrics.ece(self.probs, y),
            ood_auc=metrics.auroc(entropy(self.probs), entropy(self.outside)),
            error=1 - metrics.accuracy(self.probs, y),
        )


@dataclass(frozen=True)
class Numbers:
    """Gaussian predictions; the out-of-distribution score is their variance."""

    mean: Tensor
    std: Tensor
    outside_std: Tensor

    def score(self, method: str, y: Tensor) -> ScoreRow:
        y = y.double().flatten()
        log_prob = torch.distributions.Normal(self.mean, self.std).log_prob(y)
        return ScoreRow(
            method=method,
            nll=metrics.nll(log_prob),
            ece=interval_calibration(self.mean, self.std, y),
            ood_auc=metrics.auroc(self.std, self.outside_std),
            error=metrics.rmse(self.mean, y),
        )


def entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs.double()).sum(-1)


def interval_calibration(mean: Tensor, std: Tensor, y: Tensor, *, n_levels: int = 10) -> float:
    """Mean over levels p = 1/n … (n−1)/n of |share of targets inside the central interval of level p − p|."""
    # |z| ≤ q(p) is F(|z|) ≤ p for the half-normal F(|z|) = erf(|z| / √2).
    level = torch.erf(((y - mean) / std).double().abs() / math.sqrt(2))
    gaps = [abs(float((level <= k / n_levels).double().mean()) - k / n_levels) for k in range(1, n_levels)]
    return sum(gaps) / len(gaps)


def map_classes(model: nn.Module, parts: Parts, *, temperature: float = 1.0) -> Classes:
    """softmax(f / T) of the network; a single logit is treated as the logits (0, f) of two classes."""
    log_probs = (two_sided(outputs(model, parts.test.x)) / temperature).log_softmax(-1)
    outside = (two_sided(outputs(model, parts.outside)) / temperature).softmax(-1)
    observed = log_probs.gather(-1, parts.test.y.long().reshape(-1, 1))[:, 0]
    return Classes(log_probs.exp(), observed, outside)


def map_numbers(model: nn.Module, parts: Parts, residuals_of: Split) -> Numbers:
    """f with constant noise, the root mean square of the residuals on `residuals_of`."""
    noise_std = metrics.rmse(outputs(model, residuals_of.x), residuals_of.y.double())
    mean = outputs(model, parts.test.x)[:, 0]
    std, outside = (torch.full((n,), noise_std, dtype=torch.float64) for n in (len(mean), len(parts.outside)))
    return Numbers(mean, std, outside)


def best_temperature(model: nn.Module, held_out: Split) -> float:
    """The T in [0.1, 10] with the least held-out NLL of softmax(f / T), convex in 1/T, by ternary search on log T.

    If no held-out datum is misclassified, T would go to zero; the bound prevents that.
    """
    f, y = two_sided(outputs(model, held_out.x)), held_out.y.long().flatten()

    def loss(log_t: float) -> float:
        return float(nn.functional.cross_entropy(f / math.exp(log_t), y))

    low, high = math.log(0.1), math.log(10)
    for _ in range(100):
        third = (high - low) / 3
        low, high = (low, high - third) if loss(low + third) < loss(high - third) else (low + third, high)
    return math.exp((low + high) / 2)


def of_posterior(posterior: lw.Posterior, parts: Parts, *, classes: bool) -> Classes | Numbers:
    """`posterior.predict(x)` with its defaults."""
    tests = [posterior.predict(x) for x in parts.test.x.split(CHUNK)]
    outsides = [posterior.predict(x) for x in parts.outside.split(CHUNK)]
    if not classes:
        return Numbers(_joined(tests, "mean"), _joined(tests, "std"), _joined(outsides, "std"))
    log_prob = torch.cat([p.log_prob(y) for p, y in zip(tests, parts.test.y.split(CHUNK), strict=True)])
    return Classes(_all_probs(tests), log_prob.detach().double().flatten(), _all_probs(outsides))


def joint_nll(f: Tensor, y: Tensor, n_dyads: int, seed: int) -> float:
    """−log 1/S Σ_s Π_i p(y_i | f_s(x_i)) over ten labels of two inputs, mean over such dyads; f (S, N, C)."""
    generator = torch.Generator().manual_seed(seed)
    dyads = torch.randint(len(y), (n_dyads, 2), generator=generator)
    which = torch.randint(2, (n_dyads, N_LABELS), generator=generator)
    observed = f.log_softmax(-1)[:, torch.arange(f.shape[1]), y]
    joint = observed[:, dyads.gather(1, which)].sum(-1).logsumexp(0) - math.log(len(f))
    return -float(joint.mean())


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(chunk) for chunk in x.split(1000)]).double()


def two_sided(f: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(f), f], -1) if f.shape[-1] == 1 else f


def _joined(predictions: list[Any], name: str) -> Tensor:
    return torch.cat([getattr(p, name).detach().double().flatten() for p in predictions])


def _all_probs(predictions: list[Any]) -> Tensor:
    probs = torch.cat([p.probs.detach().double().reshape(len(p.probs), -1) for p in predictions])
    return torch.cat([1 - probs, probs], -1) if probs.shape[-1] == 1 else probs
