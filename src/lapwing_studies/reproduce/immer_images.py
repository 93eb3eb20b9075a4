"""Table 2 of Immer, Korzepa and Bauer (2021): predictions on images and on images from elsewhere.

For every prior precision δ a network is trained with it, and every posterior has the same δ. Every method takes the δ
with the best validation NLL; beside it, the δ with the best evidence of the Kronecker posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.bench.networks import n_parameters
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.claims import Claim, above, below, listed
from lapwing_studies.reproduce.immer_images_networks import all_cnn, small_cnn, three_and_three
from lapwing_studies.reproduce.means import grouped, mean_of, where
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.scores import CHUNK, entropy, outputs
from lapwing_studies.reproduce.study import Record, Study, timed
from lapwing_studies.reproduce.training import Recipe

Network = Callable[[int, int], nn.Module]
OUTSIDE = {"fashion_mnist": "MNIST", "cifar10": "SVHN"}
GLM, BNN, DAMPENED = "GLM", "BNN", "BNN dampened"


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


def run(study: Study) -> Record:
    tier = TIERS[study.effort.name]
    jobs = [
        ImageJob(study, tier, name, seed, precision)
        for seed in study.seeds
        for name in tier.networks
        for precision in tier.precisions
    ]
    facts = Record(n_train=tier.n_train, n_test=tier.n_test, epochs=tier.epochs)
    return study.record("immer2021-images", jobs, **facts)


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
        return sources.images(self.data, self.study.folder, self.seed, self.tier.n_train, self.tier.n_test)

    def run(self) -> Record:
        (model, evidence, scores), seconds = timed(self._scored)
        return Record(
            data=self.data, seed=self.seed, precision=self.precision, parameters=n_parameters(model),
            log_evidence=evidence, seconds=seconds, scores=scores,
        )  # fmt: skip

    def _scored(self) -> tuple[nn.Module, float, list[Record]]:
        model = self.trained()
        kron = self._fitted(model, lw.Kron())
        scores = [self._score(method, predict) for method, predict in self._methods(model, kron)]
        return model, float(kron.log_evidence().detach()), scores

    def trained(self) -> nn.Module:
        channels, side = self.parts.train.x.shape[1:3]
        # Adam's weight decay on the mean loss: δ / N.
        recipe = Recipe(self.tier.epochs, 1e-3, weight_decay=self.precision / len(self.parts.train))
        make = partial(self.tier.networks[self.data], channels, side)
        return self.study.network(self, make, self.parts, recipe)

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

    def _score(self, method: str, predict: Callable[[Tensor], Tensor]) -> Record:
        held_out, test = self.parts.validation, self.parts.test
        probs = predict(test.x)
        return Record(
            method=method,
            validation=_nll(predict(held_out.x), held_out.y),
            nll=_nll(probs, test.y),
            accuracy=metrics.accuracy(probs, test.y),
            ece=metrics.ece(probs, test.y, n_bins=10),
            ood_auc=metrics.auroc(entropy(probs), entropy(predict(self.parts.outside))),
        )


def _nll(probs: Tensor, y: Tensor) -> float:
    return metrics.nll(probs.double().gather(1, y[:, None])[:, 0].clamp(min=1e-12).log())


def chosen(record: Record, data: str, method: str, by: str = "validation") -> list[Record]:
    """For every seed the score at the precision of the best validation NLL, or of the best evidence."""
    found = []
    for runs in grouped(where(record["runs"], data=data), "seed").values():
        pairs = [(run, score) for run in runs for score in where(run["scores"], method=method)]
        by_evidence = max(pairs, key=lambda pair: pair[0]["log_evidence"])
        by_validation = min(pairs, key=lambda pair: pair[1]["validation"])
        found.append((by_evidence if by == "evidence" else by_validation)[1])
    return found


def methods(record: Record) -> list[str]:
    return list(dict.fromkeys(score["method"] for run in record["runs"] for score in run["scores"]))


def claims(record: Record) -> list[Claim]:
    sets = grouped(record["runs"], "data")
    missing = [name for name in OUTSIDE if name not in sets]
    found = [claim for name in sets for claim in _of(record, name)]
    found += [Claim(f"{name}: the same", "as above", "not run in this tier", None) for name in missing]
    return [*found, Claim("values of table 2", "the table", "not run: networks and images of the paper", None)]


def _of(record: Record, data: str) -> list[Claim]:
    def at(method: str, key: str) -> float:
        return mean_of(chosen(record, data, method), key)

    nll = [at(m, "nll") for m in (GLM, DAMPENED, BNN)]
    accuracy = [100 * at(m, "accuracy") for m in (GLM, BNN)]
    processes = [m for m in methods(record) if m.startswith("GP")]
    ece, steps = [at(m, "ece") for m in (processes[-1], "MAP")], [at(m, "nll") for m in processes]
    by_evidence = [score["nll"] for score in chosen(record, data, GLM, "evidence")]
    return [
        below(f"{data}: GLM has a smaller NLL than sampled weights", nll[0], nll[2]),
        Claim(f"{data}: and an accuracy higher by 2 points or more", "≥ 2",
              f"{accuracy[0]:.1f} against {accuracy[1]:.1f}", accuracy[0] - accuracy[1] >= 2),
        Claim(f"{data}: the dampened posterior is between them in NLL", "between", f"{nll[1]:.3f}",
              nll[0] <= nll[1] <= nll[2]),
        below(f"{data}: GLM has a smaller NLL than MAP", nll[0], at("MAP", "nll")),
        above(f"{data}: OOD-AUC of GLM above MAP's", at(GLM, "ood_auc"), at("MAP", "ood_auc")),
        above(f"{data}: and above that of the dampened posterior", at(GLM, "ood_auc"), at(DAMPENED, "ood_auc")),
        Claim(f"{data}: ECE of the Gaussian process not above MAP's", "not above",
              f"{ece[0]:.3f} against {ece[1]:.3f}", ece[0] <= ece[1]),
        Claim(f"{data}: the Gaussian process improves with the number of points", "falling NLL", listed(steps),
              all(a > b for a, b in pairwise(steps)) if len(steps) > 1 else None),
        Claim(f"{data}: the prior by the evidence, without held-out data, is as good for the GLM", "within 0.02 nats",
              f"{fmean(by_evidence):.3f} against {nll[0]:.3f}", fmean(by_evidence) <= nll[0] + 0.02),
    ]  # fmt: skip
