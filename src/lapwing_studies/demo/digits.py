"""Handwritten digits: accuracy, calibration, and out-of-distribution detection."""

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
from lapwing_studies.bench.networks import mlp, n_parameters, train_map
from lapwing_studies.bench.records import (
    Answers,
    Bins,
    DigitsRecord,
    DigitsRow,
    EvidenceCurve,
    Example,
    MethodCurves,
)
from lapwing_studies.bench.sizes import Size
from lapwing_studies.demo.images import SIDE, Digits, load

TRAINED_WITH = 1.0
SWEEP = (-2.0, 4.0)


@dataclass(frozen=True)
class Probs:
    """Class probabilities on the test digits, on patches of photographs, and on the test digits rotated by 90°."""

    test: Tensor
    photos: Tensor
    turned: Tensor


@dataclass(frozen=True)
class Scored:
    """A predictive method: its row of the table, and its probabilities."""

    row: DigitsRow
    probs: Probs


@dataclass(frozen=True)
class Tuned:
    """The posterior with the precision of training, of the evidence, and of the held-out digits."""

    trained: lw.Posterior
    by_evidence: lw.Posterior
    by_validation: lw.Posterior
    notices: list[str]


def run(size: Size, *, seed: int, stage: Callable[[str], None]) -> DigitsRecord:
    """Train, fit the full posterior, tune its prior by the evidence and by held-out NLL, and score every predictive."""
    data = load(size.n_digits, seed=seed)
    stage("digits: train")
    model = mlp([SIDE * SIDE, size.n_hidden, 10], seed=seed)
    train_map(model, data.train.x, data.train.y, _sum_nll, precision=TRAINED_WITH, n_steps=size.n_steps)
    stage("digits: fit")
    trained = lw.fit(model, (data.train.x, data.train.y), "classification", structure="full", prior=TRAINED_WITH)
    stage("digits: tune")
    tuned = _tune(trained, data)
    stage("digits: sweep the prior")
    curve, sampled_best = _sweep(tuned, model, data, size, seed)
    stage("digits: score")
    generator = torch.Generator().manual_seed(seed)
    scored = [_score_map(model, data)]
    for tuning, posterior in [("as in training", trained), ("evidence", tuned.by_evidence)]:
        scored += [_score_sampled(posterior, data, tuning, size, generator), _score_glm(posterior, data, tuning)]
    scored.append(_score_sampled(sampled_best, data, "validation", size, generator))
    scored.append(_score_glm(tuned.by_validation, data, "validation"))
    # The figures show the result of plain lw.tune; the table has all rows.
    shown = [s for s in scored if s.row["tuning"] in ("–", "evidence")]
    return DigitsRecord(
        parameters=n_parameters(model),
        n_train=len(data.train.y),
        n_validation=len(data.validation.y),
        n_test=len(data.test.y),
        map_on_photos=_answers(scored[0].probs.photos),
        map_on_turned=_answers(scored[0].probs.turned),
        rows=[s.row for s in scored],
        curves=[_curves(s, data) for s in shown],
        evidence=curve,
        examples=_examples(shown[0], shown[-1], data),
    )


def _sum_nll(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f, y, reduction="sum")


def _tune(trained: lw.Posterior, data: Digits) -> Tuned:
    train = (data.train.x, data.train.y)
    by_evidence = lw.tune(trained, train)
    with warnings.catch_warnings(record=True) as caught:  # kept in the record, and shown with the table
        warnings.simplefilter("always")
        held_out = (data.validation.x, data.validation.y)
        by_validation = lw.tune(trained, train, validation=held_out, progress=False)
    return Tuned(trained, by_evidence, by_validation, [str(w.message) for w in caught])


def _sweep(tuned: Tuned, model: nn.Module, data: Digits, size: Size, seed: int) -> tuple[EvidenceCurve, lw.Posterior]:
    """Evidence and held-out NLL on a grid of precisions; and the posterior with the best sampled-network NLL."""
    x, y = data.validation.x, data.validation.y
    # Tuning with held-out data has evaluated a grid already; its history is the curve of the GLM.
    tried = [step for step in tuned.by_validation.history if "tried" in step.note]
    path = [step for step in tried if SWEEP[0] <= math.log10(step.precisions[0]) <= SWEEP[1]]
    coarse = torch.logspace(*SWEEP, size.n_precisions).tolist()
    posteriors = [_at(tuned.trained, model, precision) for precision in coarse]
    sampled = [_sampled_nll(posterior, x, y, size, seed) for posterior in posteriors]
    with torch.no_grad():
        held_out_map = _sum_nll(model(x), y).item() / len(y)
    curve = EvidenceCurve(
        precision=[step.precisions[0] for step in path],
        log_evidence=[step.evidence for step in path],
        held_out_glm=[-step.score for step in path],
        precision_sampled=coarse,
        held_out_sampled=sampled,
        held_out_map=held_out_map,
        by_evidence=_precision(tuned.by_evidence),
        by_validation=_precision(tuned.by_validation),
        notices=tuned.notices,
        trained_with=TRAINED_WITH,
    )
    return curve, posteriors[sampled.index(min(sampled))]


def _at(posterior: lw.Posterior, model: nn.Module, precision: float) -> lw.Posterior:
    return posterior.with_prior(lw.prior(model, precision=precision))


def _sampled_nll(posterior: lw.Posterior, x: Tensor, y: Tensor, size: Size, seed: int) -> float:
    """All precisions use the same standard normal draws, which makes the curve smooth."""
    generator = torch.Generator().manual_seed(seed)
    p: Any = posterior.predict(x, predictive="bnn", n_samples=size.n_samples, generator=generator)
    return metrics.nll(p.log_prob(y))


def _score_map(model: nn.Module, data: Digits) -> Scored:
    with torch.no_grad():
        log_probs, photos, turned = (model(x).log_softmax(-1) for x in (data.test.x, data.photos, data.turned))
    observed = log_probs.gather(-1, data.test.y[:, None])[:, 0]
    return _scored("MAP", "–", None, Probs(log_probs.exp(), photos.exp(), turned.exp()), observed, data.test.y)


def _score_glm(posterior: lw.Posterior, data: Digits, tuning: str) -> Scored:
    predictions: list[Any] = [posterior.predict(x) for x in (data.test.x, data.photos, data.turned)]
    probs, observed = Probs(*(p.probs for p in predictions)), predictions[0].log_prob(data.test.y)
    return _scored("GLM", tuning, _precision(posterior), probs, observed, data.test.y)


def _score_sampled(
    posterior: lw.Posterior, data: Digits, tuning: str, size: Size, generator: torch.Generator
) -> Scored:
    predictions: list[Any] = [
        posterior.predict(x, predictive="bnn", n_samples=size.n_samples, generator=generator)
        for x in (data.test.x, data.photos, data.turned)
    ]
    probs, observed = Probs(*(p.probs for p in predictions)), predictions[0].log_prob(data.test.y)
    return _scored("sampled network", tuning, _precision(posterior), probs, observed, data.test.y)


def _scored(method: str, tuning: str, precision: float | None, probs: Probs, log_prob: Tensor, y: Tensor) -> Scored:
    row = DigitsRow(
        method=method,
        tuning=tuning,
        precision=precision,
        accuracy=metrics.accuracy(probs.test, y),
        nll=metrics.nll(log_prob),
        ece=metrics.ece(probs.test, y),
        brier=metrics.brier(probs.test, y),
        ood_auc_photos=metrics.auroc(_entropy(probs.test), _entropy(probs.photos)),
        ood_auc_turned=metrics.auroc(_entropy(probs.test), _entropy(probs.turned)),
    )
    return Scored(row, probs)


def _answers(probs: Tensor) -> Answers:
    confidence, labels = probs.max(-1)
    label = int(labels.mode().values)
    return Answers(label=label, share=float((labels == label).double().mean()), confidence=float(confidence.mean()))


def _curves(scored: Scored, data: Digits) -> MethodCurves:
    bins = asdict(metrics.reliability(scored.probs.test, data.test.y))
    plain = {key: [None if math.isnan(v) else v for v in values] for key, values in bins.items()}
    return MethodCurves(
        method=scored.row["method"],
        ece=scored.row["ece"],
        ood_auc_photos=scored.row["ood_auc_photos"],
        bins=cast(Bins, plain),
        entropy_digits=[round(v, 5) for v in _entropy(scored.probs.test).tolist()],
        entropy_photos=[round(v, 5) for v in _entropy(scored.probs.photos).tolist()],
    )


def _examples(map_: Scored, glm: Scored, data: Digits, *, n: int = 8) -> list[Example]:
    """The digits with the highest GLM entropy, and the patches where MAP is most overconfident relative to the GLM."""
    hardest = _entropy(glm.probs.test).argsort(descending=True)[:n].tolist()
    boldest = (map_.probs.photos.amax(-1) - glm.probs.photos.amax(-1)).argsort(descending=True)[:n].tolist()
    digits = [_example(data.test.x[k], int(data.test.y[k]), map_.probs.test[k], glm.probs.test[k]) for k in hardest]
    return digits + [_example(data.photos[k], None, map_.probs.photos[k], glm.probs.photos[k]) for k in boldest]


def _example(x: Tensor, label: int | None, map_probs: Tensor, glm_probs: Tensor) -> Example:
    return Example(
        pixels=[[round(v, 2) for v in row] for row in x.reshape(SIDE, SIDE).tolist()],
        label=label,
        map_label=int(map_probs.argmax()),
        map_confidence=float(map_probs.max()),
        glm_label=int(glm_probs.argmax()),
        glm_confidence=float(glm_probs.max()),
    )


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs.detach().double()).sum(-1)


def _precision(posterior: lw.Posterior) -> float:
    return float(posterior.prior.precisions[0])
