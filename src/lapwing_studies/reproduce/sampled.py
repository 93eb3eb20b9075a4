"""A ResNet with BatchNorm on Fashion-MNIST: the full GGN by sampling-based EM, against cheaper posteriors.

After Antorán et al. (2023), with smaller networks and data. Scores are marginal (NLL, calibration, out-of-distribution
detection) and joint: ten labels of two inputs, split between them at random, like the dyads of Osband et al. (2022).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce import scores, sources
from lapwing_studies.reproduce.image_networks import staged_resnet
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.study import Record, Study, timed
from lapwing_studies.reproduce.training import Recipe

N_DYADS, N_DRAWS = 500, 64
RTOL = 0.1  # of a precision: less than eight samples tell
SAMPLES = "full GGN, samples"
STRUCTURES: dict[str, dict[str, Any]] = {
    "last layer": {"params": "last_layer", "structure": "full"},
    "diagonal": {"structure": "diag"},
    "Kronecker": {"structure": "kron"},
}


@dataclass(frozen=True)
class Size:
    """Sizes of the data and of EM."""

    n_train: int
    n_test: int
    n_epochs: int
    n_samples: int
    max_steps: int  # of EM per round; the state is stored after each round
    n_rounds: int = 1  # at most: rounds end when no precision changes by more than RTOL in a step
    widths: tuple[int, int, int] = (16, 32, 80)  # of the network

    @property
    def recipe(self) -> Recipe:
        return Recipe(n_epochs=self.n_epochs, learning_rate=3e-3)

    @property
    def em(self) -> lw.EM:
        return lw.EM(n_samples=self.n_samples, max_steps=self.max_steps, rtol=RTOL)


SIZES = {
    "full": Size(3_000, 2_000, 15, 8, 4, 5),
    "quick": Size(500, 400, 15, 8, 3),
    "toy": Size(24, 20, 1, 2, 1, 2, (2, 4, 4)),
}

# For each step: total effective dimension, largest change of a log precision, residual of the samples' linear systems,
# and products with all samples at once.
NO_PATH = Record(effective_dimension=[], change=[], residual=[], products=[])


def run(study: Study) -> Record:
    return study.record("sampled-laplace", [SampledJob(seed, study) for seed in study.seeds])


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
    def trained_with(self) -> str:
        size = self.size
        data = f"{size.n_train} to train, {size.n_test} to test"
        return f"{size.recipe} | {data} | {size.widths} | {N_DYADS} dyads | seed {self.seed}"

    @property
    def sampled_with(self) -> str:
        return f"{self.trained_with} | {self.size.em}"

    @property
    def made_with(self) -> str:
        return f"{self.sampled_with} | {self.size.n_rounds} rounds"

    @cached_property
    def parts(self) -> Parts:
        size = self.size
        return sources.images(self.data_name, self.study.folder, self.seed, size.n_train, size.n_test, small=True)

    @property
    def learnt(self) -> tuple[Tensor, Tensor]:
        return self.parts.train.x, self.parts.train.y

    def run(self) -> Record:
        make = partial(staged_resnet, self.parts.train.x.shape[-1], self.size.widths)
        model = self.study.network(self, make, self.parts, self.size.recipe, made_with=self.trained_with)
        cheaper = [self._structured(model, method) for method in STRUCTURES]
        sampled = self._by_samples(model, cheaper[-1]["precisions"])
        return Record(
            seed=self.seed,
            data=self.data_name,
            outside=self.parts.outside_is,
            parameters=sum(p.numel() for p in model.parameters()),
            groups=len(sampled["precisions"]),
            n_train=len(self.parts.train),
            n_test=len(self.parts.test),
            n_samples=self.size.n_samples,
            rows=[self._network(model), *(tuned["row"] for tuned in cheaper), sampled["row"]],
            path=sampled["path"],
        )

    def _structured(self, model: nn.Module, method: str) -> Record:
        """Tuned by the evidence, with the training data only."""

        def tuned() -> Record:
            fitted, first = timed(partial(lw.fit, model, self.learnt, "classification", **STRUCTURES[method]))
            posterior, second = timed(partial(lw.tune, fitted, self.learnt, progress=False))
            row = self._row(method, posterior, first + second)
            return Record(row=row, precisions=_precisions(posterior), path=NO_PATH)

        return self._once(method, self.trained_with, tuned)

    def _once(self, method: str, made_with: str, work: Callable[[], Record]) -> Record:
        """Each posterior is stored when it is done, so that an interrupted study resumes after the last one."""
        return self.study.once(f"{self.name}-{method.replace(' ', '-')}", made_with, work)

    def _by_samples(self, model: nn.Module, precisions: list[float]) -> Record:
        """EM from the precisions of the cheaper structure: from a single precision it needs several more steps."""
        options: dict[str, Any] = {"structure": lw.MatrixFree(preconditioner=None)}
        options["prior"] = lw.prior(model, groups="normalised")
        posterior, seconds = timed(partial(lw.fit, model, self.learnt, "classification", **options))
        found = Record(row={**self._network(model), "seconds": seconds}, precisions=precisions, path=NO_PATH)
        current = [posterior]  # of the last round, whose samples the next one starts from

        def one_round(before: Record) -> Record:
            start = _at(current[0], before["precisions"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the number of steps is part of the study's size
                current[0], seconds = timed(partial(lw.tune, start, self.learnt, by=self.size.em))
            row = self._row(SAMPLES, lw.from_samples(current[0]), before["row"]["seconds"] + seconds)
            path = _path(current[0].history[len(start.history) :], before["path"])
            return Record(row=row, precisions=_precisions(current[0]), path=path)

        for number in range(self.size.n_rounds):
            found = self._once(f"{SAMPLES}-{number}", self.sampled_with, partial(one_round, found))
            if found["path"]["change"][-1] < RTOL:
                break
        return found

    def _network(self, model: nn.Module) -> Record:
        score = scores.map_classes(model, self.parts).score("network", self.parts.test.y)
        return self._with_joint(score, scores.outputs(model, self.parts.test.x)[None], 0)

    def _row(self, method: str, posterior: lw.Posterior, seconds: float) -> Record:
        score = scores.of_posterior(posterior, self.parts, classes=True).score(method, self.parts.test.y)
        draw = posterior.functions(N_DRAWS, torch.Generator().manual_seed(self.seed))
        f = torch.cat([draw(x).detach().double() for x in self.parts.test.x.split(scores.CHUNK)], 1)
        return self._with_joint(score, f, seconds)

    def _with_joint(self, score: scores.ScoreRow, f: Tensor, seconds: float) -> Record:
        joint = scores.joint_nll(f, self.parts.test.y, N_DYADS, self.seed)
        return Record(score=score, joint_nll=joint, seconds=seconds)


def _at(posterior: lw.Posterior, precisions: list[float]) -> lw.Posterior:
    return posterior.with_prior(posterior.prior.with_precisions(torch.tensor(precisions, dtype=torch.float64)))


def _precisions(tuned: lw.Posterior) -> list[float]:
    return tuned.prior.precisions.tolist()


def _path(steps: Sequence[Any], before: Record) -> Record:
    """The steps of this round appended to those before, whose last step it repeats."""
    steps = steps[1:] if before["change"] else steps
    return Record(
        effective_dimension=before["effective_dimension"] + [sum(step.effective_dimension) for step in steps],
        change=before["change"] + [step.change for step in steps],
        residual=before["residual"] + [step.residual for step in steps],
        products=before["products"] + [step.n_products for step in steps],
    )
