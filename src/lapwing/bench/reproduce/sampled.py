"""A batch-normed ResNet on Fashion-MNIST: the full GGN by sampling-based EM against cheaper posteriors.

After Antorán et al. (2023), whose networks and data are larger. Scores are marginal (NLL, calibration, alarm) and
joint: ten labels of two inputs, split between them at random, as Osband et al. (2022) score dyads of inputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.bench.reproduce import scores, sources
from lapwing.bench.reproduce.architectures import seeded
from lapwing.bench.reproduce.effort import Effort
from lapwing.bench.reproduce.image_networks import resnet
from lapwing.bench.reproduce.parts import Parts
from lapwing.bench.reproduce.scores import Score
from lapwing.bench.reproduce.study import Study, done, timed
from lapwing.bench.reproduce.training import Recipe, train

N_LABELS, N_DYADS, N_DRAWS = 10, 500, 64


@dataclass(frozen=True)
class Size:
    """How much of the data, and how much EM may do with it."""

    n_train: int
    n_test: int
    n_epochs: int
    n_samples: int
    max_steps: int
    widths: tuple[int, int] = (24, 56)  # of the network

    @property
    def em(self) -> lw.EM:
        """In the dual: there are fewer outputs of the data than parameters."""
        return lw.EM(n_samples=self.n_samples, max_steps=self.max_steps, rtol=0.05, solver=lw.Dense())

    @property
    def effort(self) -> Effort:
        return Effort("sampled", self.n_train, self.n_test, self.n_epochs, 1)


SIZES = {
    "full": Size(200, 400, 40, 32, 10),
    "quick": Size(100, 200, 15, 16, 6),
    "toy": Size(24, 20, 1, 2, 1, (2, 4)),
}


class SampledRow(TypedDict):
    score: Score
    joint_nll: float  # of a dyad's ten labels, nats
    seconds: float  # to fit and tune


class EmPath(TypedDict):
    """Of each step: total effective dimension, change of a log precision, residual of the samples' equations."""

    effective_dimension: list[float]
    change: list[float]
    residual: list[float]


class SampledRun(TypedDict):
    seed: int
    data: str
    outside: str
    parameters: int
    groups: int
    n_train: int
    n_test: int
    n_samples: int
    rows: list[SampledRow]
    path: EmPath


class SampledRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    runs: list[SampledRun]


def run(study: Study) -> SampledRecord:
    jobs = [SampledJob(seed, study) for seed in study.seeds]
    return SampledRecord(
        study="sampled-laplace", effort=study.effort.name, n_seeds=study.n_seeds, runs=done(study, jobs)
    )


@dataclass(frozen=True)
class SampledJob:
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"sampled-laplace-{self.data_name}-{self.study.effort.name}-{self.seed}"

    @property
    def data_name(self) -> str:
        both = self.study.folder.holds("fashion_mnist") and self.study.folder.holds("mnist")
        return "fashion_mnist" if both else "digits"

    @property
    def size(self) -> Size:
        return SIZES[self.study.effort.name]

    @property
    def recipe(self) -> Recipe:
        return Recipe(n_epochs=self.size.n_epochs, learning_rate=3e-3)

    @property
    def made_with(self) -> str:
        return f"{self.recipe} | {self.size} | {N_DYADS} dyads | seed {self.seed}"

    @cached_property
    def parts(self) -> Parts:
        if self.data_name == "digits":
            return sources.digits(self.study.folder, self.seed, self.size.effort)
        return sources.small_grey_images("fashion_mnist", "mnist", self.study.folder, self.seed, self.size.effort)

    def trained(self) -> nn.Module:
        model = seeded(lambda: resnet(self.parts.train.x.shape[-1], self.size.widths), seed=self.seed)
        if not self.study.store.load_weights(self.name, self.made_with, model):
            train(model, self.parts, nn.functional.cross_entropy, self.recipe, seed=self.seed)
            self.study.store.keep_weights(self.name, self.made_with, model)
        return model.eval()

    def run(self) -> SampledRun:
        model, path = self.trained(), EmPath(effective_dimension=[], change=[], residual=[])
        rows, groups = [self._network(model)], 0
        for method, posterior, seconds in self._posteriors(model):
            if posterior.draws is not None:
                path, groups = _path(posterior), len(posterior.prior.precisions)
                posterior = lw.sampled(posterior)
            rows.append(self._row(method, posterior, seconds))
        return SampledRun(
            seed=self.seed,
            data=self.data_name,
            outside=self.parts.outside_is,
            parameters=sum(p.numel() for p in model.parameters()),
            groups=groups,
            n_train=len(self.parts.train),
            n_test=len(self.parts.test),
            n_samples=self.size.n_samples,
            rows=rows,
            path=path,
        )

    def _posteriors(self, model: nn.Module) -> Iterator[tuple[str, lw.Posterior, float]]:
        """Each tuned by the evidence, on the training data alone."""
        split = self.parts.train
        data = split.x, split.y
        structures: tuple[tuple[str, dict[str, Any]], ...] = (
            ("last layer", {"params": "last_layer", "structure": "full"}),
            ("diagonal", {"structure": "diag"}),
            ("Kronecker", {"structure": "kron"}),
        )
        tuned = None
        for method, options in structures:
            fitted, first = timed(partial(lw.fit, model, data, "classification", **options))
            tuned, second = timed(partial(lw.tune, fitted, data, progress=False))
            yield method, tuned, first + second
        # Precisions of the cheaper structure are where EM starts: from a common one it needs several steps more.
        free, first = timed(lambda: lw.fit(model, data, "classification", structure=lw.MatrixFree(preconditioner=None)))
        free = free if tuned is None else free.with_prior(tuned.prior)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the number of steps is part of the study's size
            tuned, second = timed(lambda: lw.tune(free, data, by=self.size.em, progress=False))
        yield "full GGN, samples", tuned, first + second

    def _network(self, model: nn.Module) -> SampledRow:
        score = scores.map_classes(model, self.parts).score("network", self.parts.test.y)
        return SampledRow(score=score, joint_nll=self._joint(scores.outputs(model, self.parts.test.x)[None]), seconds=0)

    def _row(self, method: str, posterior: lw.Posterior, seconds: float) -> SampledRow:
        score = scores.of_posterior(posterior, self.parts, classes=True).score(method, self.parts.test.y)
        draw = posterior.functions(N_DRAWS, torch.Generator().manual_seed(self.seed))
        f = torch.cat([draw(x).detach().double() for x in self.parts.test.x.split(scores.CHUNK)], 1)
        return SampledRow(score=score, joint_nll=self._joint(f), seconds=seconds)

    def _joint(self, f: Tensor) -> float:
        """−log 1/S Σ_s Π_i p(y_i | f_s(x_i)) over the labels of a dyad, mean over dyads; f (S, N, C)."""
        generator = torch.Generator().manual_seed(self.seed)
        dyads = torch.randint(len(self.parts.test), (N_DYADS, 2), generator=generator)
        which = torch.randint(2, (N_DYADS, N_LABELS), generator=generator)
        rows = dyads.gather(1, which)
        observed = f.log_softmax(-1)[:, torch.arange(f.shape[1]), self.parts.test.y]
        joint = observed[:, rows].sum(-1).logsumexp(0) - math.log(len(f))
        return -float(joint.mean())


def _path(tuned: lw.Posterior) -> EmPath:
    return EmPath(
        effective_dimension=[sum(step.effective_dimension) for step in tuned.history],
        change=[step.change for step in tuned.history],
        residual=[step.residual for step in tuned.history],
    )
