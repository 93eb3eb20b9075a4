"""How well alarms detect out-of-distribution inputs, and their rate of false alarms.

The alarm's score was chosen on seeds 0 and 1 of these pairs; the study uses seeds from 2 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing.errors import InputError
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import scores
from lapwing_studies.reproduce.claims import Claim, at_least
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.pairs import Pair, listed
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.study import Record, Study, timed

FIRST_SEED = 2
LEVEL = 0.05
METHODS = ("entropy", "temperature", "p.epistemic", "alarm")


def run(study: Study) -> Record:
    """Every pair whose data are available, at every seed."""
    jobs = [AlarmJob(pair, FIRST_SEED + k, study) for pair in listed(study.folder) for k in study.seeds]
    if not jobs:
        raise InputError("alarm: no data. Name the folder that holds them: --data FOLDER.")
    return study.record("alarm", jobs)


@dataclass(frozen=True)
class AlarmJob:
    pair: Pair
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"{self.pair.name}-{self.seed}"

    @property
    def made_with(self) -> str:
        effort = self.pair.learnt_with(self.study.effort)
        recipe = self.pair.recipe.at_most(effort.n_epochs)
        return f"{self.pair.words} | {recipe} | {effort.n_train} rows, {effort.n_test} tested | seed {self.seed}"

    @cached_property
    def parts(self) -> Parts:
        return self.pair.parts(self.study.folder, self.seed, self.study.effort)

    def network(self) -> nn.Module:
        recipe = self.pair.recipe.at_most(self.study.effort.n_epochs)
        return self.study.network(self, lambda: self.pair.network(self.parts), self.parts, recipe)

    def run(self) -> Record:
        """`scale` is the factor on the precisions that held-out NLL chose."""
        parts = self.parts
        learnt, held_out = ((p.x, p.y) for p in (parts.train, parts.validation))
        model, trained = timed(self.network)
        posterior, fitted = timed(lambda: lw.fit(model, learnt, "classification", progress=False))
        tuned, tuning = timed(lambda: lw.tune(posterior, learnt, validation=held_out, progress=False))
        alarm, calibrated = timed(lambda: lw.alarm(tuned, held_out, progress=False))
        (inside, outside), called = timed(lambda: (alarm(parts.test.x), alarm(parts.outside)))
        seconds = {"train": trained, "fit": fitted, "tune": tuning, "alarm": calibrated, "call": called}
        auroc = _auroc_of_others(model, tuned, parts) | {"alarm": metrics.auroc(-inside, -outside)}
        return Record(
            pair=self.pair.name,
            inside=self.pair.inside,
            outside=self.pair.outside,
            network=self.pair.words,
            seed=self.seed,
            parameters=n_parameters(model),
            structure=type(posterior.structure).__name__.lower(),
            n_train=len(parts.train),
            n_held_out=len(parts.validation),
            n_test=len(parts.test),
            accuracy=metrics.accuracy(scores.outputs(model, parts.test.x).softmax(-1), parts.test.y),
            scale=tuned.history[-1].scale,
            seconds={key: round(value, 3) for key, value in seconds.items()},
            auroc={method: round(auroc[method], 4) for method in METHODS},
            false_alarms=float((inside <= LEVEL).double().mean()),
            raised=float((outside <= LEVEL).double().mean()),
            examples=_examples(model, parts, outside) if self.pair.pictures else [],
        )


def _auroc_of_others(model: nn.Module, tuned: lw.Posterior, parts: Parts) -> dict[str, float]:
    temperature = scores.best_temperature(model, parts.validation)
    plain = partial(scores.map_classes, model, parts)
    entropies = {"entropy": plain(), "temperature": plain(temperature=temperature)}
    found = {name: metrics.auroc(scores.entropy(c.probs), scores.entropy(c.outside)) for name, c in entropies.items()}
    return found | {"p.epistemic": metrics.auroc(_epistemic(tuned, parts.test.x), _epistemic(tuned, parts.outside))}


def _epistemic(posterior: lw.Posterior, x: Tensor) -> Tensor:
    predictions: list[Any] = [posterior.predict(chunk) for chunk in x.split(scores.CHUNK)]
    return torch.cat([p.epistemic.detach().double() for p in predictions])


def _examples(model: nn.Module, parts: Parts, p_values: Tensor, n: int = 3) -> list[Record]:
    """The out-of-distribution images that raised the alarm and on which the network is most confident; pixels from 0
    to 255."""
    confidence, label = scores.outputs(model, parts.outside).softmax(-1).max(-1)
    order = torch.where(p_values <= LEVEL, confidence, -1.0).argsort(descending=True)[:n].tolist()
    return [
        Record(
            pixels=(255 * parts.outside[i, 0]).round().int().tolist(),
            label=int(label[i]),
            confidence=round(float(confidence[i]), 4),
            p_value=round(float(p_values[i]), 4),
        )
        for i in order
        if p_values[i] <= LEVEL
    ]


def gains(record: Record, over: str) -> dict[str, float]:
    """AUROC of the alarm above that of another method, by pair; means over seeds."""
    pairs = grouped(record["runs"], "pair")
    return {name: fmean(r["auroc"]["alarm"] - r["auroc"][over] for r in runs) for name, runs in pairs.items()}


def claims(record: Record) -> list[Claim]:
    on_entropy, on_temperature = (list(gains(record, other).values()) for other in ("entropy", "temperature"))
    return [
        Claim("worst AUROC against entropy", "≥ −0.010", f"{min(on_entropy):+.3f}", min(on_entropy) >= -0.01),
        Claim("mean AUROC against entropy", "≥ +0.030", f"{fmean(on_entropy):+.3f}", fmean(on_entropy) >= 0.03),
        at_least("better than temperature", 6 * len(on_temperature) // 8, [gain > 0 for gain in on_temperature]),
    ]
