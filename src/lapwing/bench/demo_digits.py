"""Handwritten digits: accuracy, calibration, and digits turned on their side as the inputs nobody trained for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing.bench.networks import mlp, n_parameters, train_map
from lapwing.bench.records import Bins, DigitsRecord, DigitsRow, EvidenceCurve, Example, MethodCurves, Shifted
from lapwing.bench.sizes import Size

TRAINED_WITH = 1.0
SHIFT = "turned by 90°"


@dataclass(frozen=True)
class Split:
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Digits:
    train: Split
    validation: Split
    test: Split

    def turned(self) -> Tensor:
        """The test digits rotated by a quarter turn."""
        return self.test.x.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64)


@dataclass(frozen=True)
class Scored:
    """One way to predict: its row of the table, and its probabilities on the test digits, upright and turned."""

    row: DigitsRow
    probs: Tensor
    probs_turned: Tensor


def run(size: Size, *, seed: int, stage: Callable[[str], None]) -> DigitsRecord:
    """Train, fit the full posterior, tune its prior by the evidence and by held-out NLL, score every predictive."""
    data = load(size.n_digits, seed=seed)
    stage("digits: train")
    model = mlp([64, size.n_hidden, 10], seed=seed)
    train_map(model, data.train.x, data.train.y, _sum_nll, precision=TRAINED_WITH, n_steps=size.n_steps)
    stage("digits: fit")
    trained = lw.fit(model, (data.train.x, data.train.y), "classification", structure="full", prior=TRAINED_WITH)
    stage("digits: tune")
    by_evidence = lw.tune(trained, (data.train.x, data.train.y), by="evidence")
    with warnings.catch_warnings(record=True) as caught:  # kept in the record, and shown with the table
        warnings.simplefilter("always")
        by_validation = lw.tune(trained, by="validation", validation=(data.validation.x, data.validation.y))
    notices = [str(w.message) for w in caught]
    stage("digits: sweep the prior")
    curve, sampled_best = _sweep(trained, model, data, size, by_evidence, by_validation, notices, seed)
    stage("digits: score")
    generator = torch.Generator().manual_seed(seed)
    scored = [_score_map(model, data)]
    for tuning, posterior in [("as in training", trained), ("evidence", by_evidence)]:
        scored += [_score_sampled(posterior, data, tuning, size, generator), _score_glm(posterior, data, tuning)]
    scored.append(_score_sampled(sampled_best, data, "validation", size, generator))
    scored.append(_score_glm(by_validation, data, "validation"))
    # The pictures show what a plain lw.tune gives; the table has every row.
    shown = [s for s in scored if s.row["tuning"] in ("–", "evidence")]
    return DigitsRecord(
        parameters=n_parameters(model),
        n_train=len(data.train.y),
        n_validation=len(data.validation.y),
        n_test=len(data.test.y),
        shift=SHIFT,
        shifted=_shifted(scored[0]),
        rows=[s.row for s in scored],
        curves=[_curves(s, data) for s in shown],
        evidence=curve,
        examples=_examples(shown[0], shown[-1], data),
    )


def load(n: int, *, seed: int) -> Digits:
    """scikit-learn's 8 × 8 digits, shuffled and cut into 60% training, 20% validation, 20% test."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:n]
    x = (torch.as_tensor(pixels, dtype=torch.float32) / 16)[order]
    y = torch.as_tensor(labels)[order]
    first, second = int(0.6 * n), int(0.8 * n)
    return Digits(Split(x[:first], y[:first]), Split(x[first:second], y[first:second]), Split(x[second:], y[second:]))


def _sum_nll(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f, y, reduction="sum")


def _sweep(
    posterior: lw.Posterior,
    model: nn.Module,
    data: Digits,
    size: Size,
    by_evidence: lw.Posterior,
    by_validation: lw.Posterior,
    notices: list[str],
    seed: int,
) -> tuple[EvidenceCurve, lw.Posterior]:
    """Evidence and held-out NLL along a grid of precisions; also the posterior that suits the sampled network best."""
    precisions = torch.logspace(-2, 4, size.n_precisions).tolist()
    x, y = data.validation.x, data.validation.y
    posteriors = [posterior.with_prior(lw.prior(model, precision=p)) for p in precisions]
    glm = [metrics.nll(p.predict(x).log_prob(y)) for p in posteriors]
    sampled = [
        metrics.nll(
            p.predict(
                x, predictive="bnn", n_samples=size.n_samples, generator=torch.Generator().manual_seed(seed)
            ).log_prob(y)
        )
        for p in posteriors
    ]
    with torch.no_grad():
        held_out_map = _sum_nll(model(x), y).item() / len(y)
    curve = EvidenceCurve(
        precision=precisions,
        log_evidence=[float(p.log_evidence()) for p in posteriors],
        held_out_glm=glm,
        held_out_sampled=sampled,
        held_out_map=held_out_map,
        by_evidence=_precision(by_evidence),
        by_validation=_precision(by_validation),
        notices=notices,
        trained_with=TRAINED_WITH,
    )
    return curve, posteriors[sampled.index(min(sampled))]


def _score_map(model: nn.Module, data: Digits) -> Scored:
    with torch.no_grad():
        log_probs, turned = model(data.test.x).log_softmax(-1), model(data.turned()).softmax(-1)
    observed = log_probs.gather(-1, data.test.y[:, None])[:, 0]
    return _scored("MAP", "–", None, log_probs.exp(), turned, observed, data.test.y)


def _score_glm(posterior: lw.Posterior, data: Digits, tuning: str) -> Scored:
    p: Any = posterior.predict(data.test.x)
    turned: Any = posterior.predict(data.turned())
    return _scored("GLM", tuning, _precision(posterior), p.probs, turned.probs, p.log_prob(data.test.y), data.test.y)


def _score_sampled(
    posterior: lw.Posterior, data: Digits, tuning: str, size: Size, generator: torch.Generator
) -> Scored:
    p: Any = posterior.predict(data.test.x, predictive="bnn", n_samples=size.n_samples, generator=generator)
    turned: Any = posterior.predict(data.turned(), predictive="bnn", n_samples=size.n_samples, generator=generator)
    observed = p.log_prob(data.test.y)
    return _scored("sampled network", tuning, _precision(posterior), p.probs, turned.probs, observed, data.test.y)


def _scored(
    method: str, tuning: str, precision: float | None, probs: Tensor, turned: Tensor, log_prob: Tensor, y: Tensor
) -> Scored:
    row = DigitsRow(
        method=method,
        tuning=tuning,
        precision=precision,
        accuracy=metrics.accuracy(probs, y),
        nll=metrics.nll(log_prob),
        ece=metrics.ece(probs, y),
        brier=metrics.brier(probs, y),
        ood_auc=metrics.auroc(_entropy(probs), _entropy(turned)),
    )
    return Scored(row, probs, turned)


def _shifted(scored: Scored) -> Shifted:
    confidence, labels = scored.probs_turned.max(-1)
    label = int(labels.mode().values)
    return Shifted(label=label, share=float((labels == label).double().mean()), confidence=float(confidence.mean()))


def _curves(scored: Scored, data: Digits) -> MethodCurves:
    bins = asdict(metrics.reliability(scored.probs, data.test.y))
    plain = {key: [None if math.isnan(v) else v for v in values] for key, values in bins.items()}
    return MethodCurves(
        method=scored.row["method"],
        ece=scored.row["ece"],
        ood_auc=scored.row["ood_auc"],
        bins=cast(Bins, plain),
        entropy_in=[round(v, 5) for v in _entropy(scored.probs).tolist()],
        entropy_out=[round(v, 5) for v in _entropy(scored.probs_turned).tolist()],
    )


def _examples(map_: Scored, glm: Scored, data: Digits, *, n: int = 8) -> list[Example]:
    """The upright digits of highest GLM entropy, and the turned ones where MAP is surer than the GLM by most."""
    hardest = _entropy(glm.probs).argsort(descending=True)[:n]
    boldest = (map_.probs_turned.amax(-1) - glm.probs_turned.amax(-1)).argsort(descending=True)[:n]
    upright = [_example("upright", data.test.x[k], data.test.y[k], map_.probs[k], glm.probs[k]) for k in hardest]
    turned = data.turned()
    return upright + [
        _example("turned", turned[k], data.test.y[k], map_.probs_turned[k], glm.probs_turned[k]) for k in boldest
    ]


def _example(kind: str, x: Tensor, y: Tensor, map_probs: Tensor, glm_probs: Tensor) -> Example:
    return Example(
        kind=kind,
        pixels=[[round(v, 2) for v in row] for row in x.reshape(8, 8).tolist()],
        label=int(y),
        map_label=int(map_probs.argmax()),
        map_confidence=float(map_probs.max()),
        glm_label=int(glm_probs.argmax()),
        glm_confidence=float(glm_probs.max()),
    )


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs.detach().double()).sum(-1)


def _precision(posterior: lw.Posterior) -> float:
    return float(posterior.prior.precisions[0])
