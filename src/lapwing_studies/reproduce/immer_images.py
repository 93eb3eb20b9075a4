"""Table 2 of Immer, Korzepa and Bauer (2021): predictions on images and on images from elsewhere.

For every prior precision δ a network is trained with it, and every posterior has the same δ. Every method takes the δ
with the best validation NLL; beside it, the δ with the best evidence of the Kronecker posterior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.architectures import seeded
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.immer_images_networks import all_cnn, small_cnn, three_and_three
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.scores import entropy, outputs
from lapwing_studies.reproduce.study import Study, done, timed
from lapwing_studies.reproduce.training import Recipe, train

Network = Callable[[int, int], nn.Module]
OUTSIDE = {"fashion_mnist": "MNIST", "cifar10": "SVHN"}
GLM, BNN, DAMPENED = "GLM", "BNN", "BNN dampened"
CHUNK = 250


@dataclass(frozen=True)
class Tier:
    n_train: int
    n_test: int
    epochs: int
    precisions: tuple[float, ...]
    points: tuple[int, ...]  # of the Gaussian process
    networks: dict[str, Network]
    n_samples: int = 100


_DECADES = (0.1, 1.0, 10.0, 100.0)
TIERS = {
    "toy": Tier(60, 40, 1, (1.0, 10.0), (5,), {"fashion_mnist": small_cnn}, 5),
    "quick": Tier(2000, 1000, 15, (1.0, 10.0), (50, 200), {"fashion_mnist": small_cnn}),
    "full": Tier(6000, 2000, 60, _DECADES, (50, 200, 800), {"fashion_mnist": small_cnn, "cifar10": small_cnn}),
    "faithful": Tier(
        48_000, 10_000, 100, _DECADES, (400, 800, 1600, 3200), {"fashion_mnist": three_and_three, "cifar10": all_cnn}
    ),
}


class MethodScore(TypedDict):
    method: str
    validation: float
    nll: float
    accuracy: float
    ece: float
    ood_auc: float


class ImageRun(TypedDict):
    data: str
    seed: int
    precision: float
    parameters: int
    log_evidence: float
    seconds: float
    scores: list[MethodScore]


class ImmerImagesRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    n_train: int
    n_test: int
    epochs: int
    runs: list[ImageRun]


def run(study: Study) -> ImmerImagesRecord:
    tier = TIERS[study.effort.name]
    jobs = [
        ImageJob(study, tier, name, seed, precision)
        for seed in study.seeds
        for name in tier.networks
        for precision in tier.precisions
    ]
    runs = done(study, jobs)
    return ImmerImagesRecord(
        study="immer2021-images", effort=study.effort.name, n_seeds=study.n_seeds, n_train=tier.n_train,
        n_test=tier.n_test, epochs=tier.epochs, runs=runs,
    )  # fmt: skip


@dataclass(frozen=True)
class ImageJob:
    """One network, and every method with it."""

    study: Study
    tier: Tier
    data: str
    seed: int
    precision: float

    @property
    def name(self) -> str:
        return f"{self.data}-{self.seed}-{self.precision:g}"

    @property
    def made_with(self) -> str:
        t = self.tier
        return f"{t.n_train} {t.n_test} {t.epochs} {t.points} {t.networks[self.data].__name__} {t.n_samples} v1"

    @cached_property
    def parts(self) -> Parts:
        t = self.tier
        effort = Effort(self.study.effort.name, t.n_train, t.n_test, t.epochs, 1)
        if self.data == "cifar10":
            return sources.colour_images(self.study.folder, self.seed, effort)
        return sources.grey_images(self.data, "mnist", self.study.folder, self.seed, effort)

    def run(self) -> ImageRun:
        (model, evidence, scores), seconds = timed(self._scored)
        return ImageRun(
            data=self.data, seed=self.seed, precision=self.precision, parameters=n_parameters(model),
            log_evidence=evidence, seconds=seconds, scores=scores,
        )  # fmt: skip

    def _scored(self) -> tuple[nn.Module, float, list[MethodScore]]:
        model = self.trained()
        kron = self._fitted(model, lw.Kron())
        scores = [self._score(method, predict) for method, predict in self._methods(model, kron)]
        return model, float(kron.log_evidence().detach()), scores

    def trained(self) -> nn.Module:
        channels, side = self.parts.train.x.shape[1:3]
        model = seeded(lambda: self.tier.networks[self.data](channels, side), seed=self.seed)
        if not self.study.store.load_weights(self.name, self.made_with, model):
            # Adam's weight decay on the mean loss: δ / N.
            recipe = Recipe(self.tier.epochs, 1e-3, weight_decay=self.precision / len(self.parts.train))
            train(model, self.parts, nn.functional.cross_entropy, recipe, seed=self.seed)
            self.study.store.keep_weights(self.name, self.made_with, model)
        return model.eval()

    def _methods(self, model: nn.Module, kron: lw.Posterior) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
        dampened = self._fitted(model, lw.Kron(damping="split"))
        yield "MAP", lambda x: outputs(model, x).softmax(-1)
        yield BNN, self._predict(kron, predictive="bnn")
        yield DAMPENED, self._predict(dampened, predictive="bnn")
        yield GLM, self._predict(kron, link="mc")
        yield "GLM diag", self._predict(self._fitted(model, "diag"), link="mc")
        for m in self.tier.points:
            process = self._fitted(model, lw.GP(n_points=m, coupling="independent"))
            yield f"GP {m}", self._predict(process, link="mc")

    def _fitted(self, model: nn.Module, structure: Any) -> lw.Posterior:
        rows = (self.parts.train.x, self.parts.train.y)
        return lw.fit(model, rows, "classification", structure=structure, prior=self.precision, progress=False)

    def _predict(self, posterior: lw.Posterior, **options: Any) -> Callable[[Tensor], Tensor]:
        def probs(x: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(self.seed)
            some: Any = posterior.predict(x, n_samples=self.tier.n_samples, generator=generator, **options)
            return some.probs.detach().double()

        return lambda x: torch.cat([probs(chunk) for chunk in x.split(CHUNK)])

    def _score(self, method: str, predict: Callable[[Tensor], Tensor]) -> MethodScore:
        held_out, test = self.parts.validation, self.parts.test
        probs = predict(test.x)
        return MethodScore(
            method=method,
            validation=_nll(predict(held_out.x), held_out.y),
            nll=_nll(probs, test.y),
            accuracy=metrics.accuracy(probs, test.y),
            ece=metrics.ece(probs, test.y, n_bins=10),
            ood_auc=metrics.auroc(entropy(probs), entropy(predict(self.parts.outside))),
        )


def _nll(probs: Tensor, y: Tensor) -> float:
    return metrics.nll(probs.double().gather(1, y[:, None])[:, 0].clamp(min=1e-12).log())


def chosen(record: ImmerImagesRecord, data: str, method: str, by: str = "validation") -> list[MethodScore]:
    """For every seed the score at the precision of the best validation NLL, or of the best evidence."""
    found = []
    for seed in range(record["n_seeds"]):
        pairs = [(run, score) for run in record["runs"] if (run["data"], run["seed"]) == (data, seed)
                 for score in run["scores"] if score["method"] == method]  # fmt: skip
        best: Callable[[Any], float] = (
            (lambda pair: float(pair[1]["validation"]))
            if by == "validation"
            else (lambda pair: -float(pair[0]["log_evidence"]))
        )
        found.append(min(pairs, key=best)[1])
    return found


def mean(record: ImmerImagesRecord, data: str, method: str, key: str) -> float:
    return fmean(float(score[key]) for score in chosen(record, data, method))  # type: ignore[literal-required]


def methods(record: ImmerImagesRecord) -> list[str]:
    return list(dict.fromkeys(score["method"] for run in record["runs"] for score in run["scores"]))


def claims(record: ImmerImagesRecord) -> list[Claim]:
    sets = list(dict.fromkeys(run["data"] for run in record["runs"]))
    missing = [name for name in OUTSIDE if name not in sets]
    found = [claim for name in sets for claim in _of(record, name)]
    return found + [Claim(f"{name}: the same", "as above", "not run in this tier", None) for name in missing]


def _of(record: ImmerImagesRecord, data: str) -> list[Claim]:
    def at(method: str, key: str) -> float:
        return mean(record, data, method, key)

    nll = [at(m, "nll") for m in (GLM, DAMPENED, BNN)]
    accuracy = [100 * at(m, "accuracy") for m in (GLM, DAMPENED, BNN)]
    auc = [at(m, "ood_auc") for m in (GLM, "MAP")]
    processes = [m for m in methods(record) if m.startswith("GP")]
    ece, steps = [at(m, "ece") for m in (processes[-1], "MAP")], [at(m, "nll") for m in processes]
    return [
        Claim(f"{data}: GLM has a smaller NLL than sampled weights", "smaller",
              f"{nll[0]:.3f} against {nll[2]:.3f}", nll[0] < nll[2]),
        Claim(f"{data}: and an accuracy higher by 2 points or more", "≥ 2",
              f"{accuracy[0]:.1f} against {accuracy[2]:.1f}", accuracy[0] - accuracy[2] >= 2),
        Claim(f"{data}: the dampened posterior is between them in NLL", "between", f"{nll[1]:.3f}",
              nll[0] <= nll[1] <= nll[2]),
        Claim(f"{data}: OOD-AUC of GLM above MAP's", "above", f"{auc[0]:.3f} against {auc[1]:.3f}", auc[0] > auc[1]),
        Claim(f"{data}: ECE of the Gaussian process not above MAP's", "not above",
              f"{ece[0]:.3f} against {ece[1]:.3f}", ece[0] <= ece[1]),
        Claim(f"{data}: the Gaussian process improves with the number of points", "falling NLL",
              ", ".join(f"{v:.3f}" for v in steps) or "–",
              steps == sorted(steps, reverse=True) if len(steps) > 1 and not any(map(math.isnan, steps)) else None),
    ]  # fmt: skip
