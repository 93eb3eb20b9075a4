"""A ResNet with BatchNorm on Fashion-MNIST: the full GGN by sampling-based EM, against cheaper posteriors.

After Antorán et al. (2023), with smaller networks and data. Scores are marginal (NLL, calibration, out-of-distribution
detection) and joint: ten labels of two inputs, split between them at random, like the dyads of Osband et al. (2022).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce import scores, sources
from lapwing_studies.reproduce.claims import Claim, below, listed
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.image_networks import staged_resnet
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.study import Record, Study, timed
from lapwing_studies.reproduce.training import Recipe

N_LABELS, N_DYADS, N_DRAWS = 10, 500, 64
RTOL = 0.1  # of a precision: less than eight samples tell
FEW = 10  # steps
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
    def em(self) -> lw.EM:
        return lw.EM(n_samples=self.n_samples, max_steps=self.max_steps, rtol=RTOL)

    @property
    def effort(self) -> Effort:
        return Effort("sampled", self.n_train, self.n_test, self.n_epochs, 1)


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
    def recipe(self) -> Recipe:
        return Recipe(n_epochs=self.size.n_epochs, learning_rate=3e-3)

    @property
    def trained_with(self) -> str:
        size = self.size
        data = f"{size.n_train} to train, {size.n_test} to test"
        return f"{self.recipe} | {data} | {size.widths} | {N_DYADS} dyads | seed {self.seed}"

    @property
    def sampled_with(self) -> str:
        return f"{self.trained_with} | {self.size.em}"

    @property
    def made_with(self) -> str:
        return f"{self.sampled_with} | {self.size.n_rounds} rounds"

    @cached_property
    def parts(self) -> Parts:
        if self.data_name == "digits":
            return sources.digits(self.study.folder, self.seed, self.size.effort)
        return sources.small_grey_images("fashion_mnist", "mnist", self.study.folder, self.seed, self.size.effort)

    def trained(self) -> nn.Module:
        side = self.parts.train.x.shape[-1]
        make = partial(staged_resnet, side, self.size.widths)
        return self.study.network(self, make, self.parts, self.recipe, made_with=self.trained_with)

    def run(self) -> Record:
        model = self.trained()
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

    @property
    def _data(self) -> tuple[Tensor, Tensor]:
        return self.parts.train.x, self.parts.train.y

    def _structured(self, model: nn.Module, method: str) -> Record:
        """Tuned by the evidence, with the training data only."""
        if (kept := self._kept(method, self.trained_with)) is None:
            fitted, first = timed(partial(lw.fit, model, self._data, "classification", **STRUCTURES[method]))
            tuned, second = timed(partial(lw.tune, fitted, self._data, progress=False))
            kept = Record(row=self._row(method, tuned, first + second), precisions=_precisions(tuned), path=NO_PATH)
            self._keep(method, self.trained_with, kept)
        return kept

    def _kept(self, method: str, made_with: str) -> Record | None:
        """Each posterior is stored when it is done, so that an interrupted study resumes after the last one."""
        return None if self.study.again else self.study.store.record(self._named(method), made_with)

    def _keep(self, method: str, made_with: str, tuned: Record) -> None:
        self.study.store.keep_record(self._named(method), made_with, tuned)

    def _named(self, method: str) -> str:
        return f"{self.name}-{method.replace(' ', '-')}"

    def _by_samples(self, model: nn.Module, precisions: list[float]) -> Record:
        """EM from the precisions of the cheaper structure: from a single precision it needs several more steps."""
        options: dict[str, Any] = {"structure": lw.MatrixFree(preconditioner=None)}
        options["prior"] = lw.prior(model, groups="normalised")
        posterior, seconds = timed(partial(lw.fit, model, self._data, "classification", **options))
        found = Record(row=self._network(model), precisions=precisions, path=NO_PATH)
        found["row"]["seconds"] = seconds
        for number in range(self.size.n_rounds):
            name = f"{SAMPLES}-{number}"
            if (kept := self._kept(name, self.sampled_with)) is None:
                start = _at(posterior, found["precisions"])
                posterior, seconds = timed(partial(self._stepped, start))
                row = self._row(SAMPLES, lw.from_samples(posterior), found["row"]["seconds"] + seconds)
                path = _path(posterior.history[len(start.history) :], found["path"])
                kept = Record(row=row, precisions=_precisions(posterior), path=path)
                self._keep(name, self.sampled_with, kept)
            found = kept
            if found["path"]["change"][-1] < RTOL:
                break
        return found

    def _stepped(self, start: lw.Posterior) -> lw.Posterior:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the number of steps is part of the study's size
            return lw.tune(start, self._data, by=self.size.em)

    def _network(self, model: nn.Module) -> Record:
        score = scores.map_classes(model, self.parts).score("network", self.parts.test.y)
        return Record(score=score, joint_nll=self._joint(scores.outputs(model, self.parts.test.x)[None]), seconds=0)

    def _row(self, method: str, posterior: lw.Posterior, seconds: float) -> Record:
        score = scores.of_posterior(posterior, self.parts, classes=True).score(method, self.parts.test.y)
        draw = posterior.functions(N_DRAWS, torch.Generator().manual_seed(self.seed))
        f = torch.cat([draw(x).detach().double() for x in self.parts.test.x.split(scores.CHUNK)], 1)
        return Record(score=score, joint_nll=self._joint(f), seconds=seconds)

    def _joint(self, f: Tensor) -> float:
        """−log 1/S Σ_s Π_i p(y_i | f_s(x_i)) over the labels of a dyad, mean over dyads; f (S, N, C)."""
        generator = torch.Generator().manual_seed(self.seed)
        dyads = torch.randint(len(self.parts.test), (N_DYADS, 2), generator=generator)
        which = torch.randint(2, (N_DYADS, N_LABELS), generator=generator)
        rows = dyads.gather(1, which)
        observed = f.log_softmax(-1)[:, torch.arange(f.shape[1]), self.parts.test.y]
        joint = observed[:, rows].sum(-1).logsumexp(0) - math.log(len(f))
        return -float(joint.mean())


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


def methods(record: Record) -> list[str]:
    return [row["score"]["method"] for row in record["runs"][0]["rows"]]


def values(record: Record, method: str, key: str) -> list[float]:
    """One score by seed."""
    rows = [row for run in record["runs"] for row in run["rows"] if row["score"]["method"] == method]
    return [float({**row["score"], **row}[key]) for row in rows]


def settled(path: Record) -> int:
    """The step from which on the effective dimension stays within 5% of its last value."""
    gamma = path["effective_dimension"]
    far = [k for k, value in enumerate(gamma) if abs(value - gamma[-1]) > 0.05 * gamma[-1]]
    return far[-1] + 1 if far else 0


def claims(record: Record) -> list[Claim]:
    def at(method: str, key: str) -> float:
        return fmean(values(record, method, key))

    paths, ece = [run["path"] for run in record["runs"]], [at(m, "ece") for m in (SAMPLES, *STRUCTURES)]
    steps, last = [len(path["change"]) - 1 for path in paths], [path["change"][-1] for path in paths]
    stops = [n <= FEW and change < RTOL for n, change in zip(steps, last, strict=True)]
    settle = [settled(path) for path in paths]
    return [
        below("samples under the full GGN have a better joint NLL than Kronecker factors",
              at(SAMPLES, "joint_nll"), at("Kronecker", "joint_nll"), wanted="better", shown="{:.2f}"),
        Claim("better calibrated (ECE) than last layer, diagonal and Kronecker factors", "better",
              f"{ece[0]:.3f} against {listed(ece[1:])}", ece[0] < min(ece[1:])),
        below("better NLL than the last layer", at(SAMPLES, "nll"), at("last layer", "nll"), wanted="better"),
        Claim(f"EM converges in a few steps: every precision moves by less than {RTOL:.0%}", f"≤ {FEW} steps",
              f"after {listed(steps, '{}')} steps the largest change of a log precision is {listed(last, '{:.2g}')}",
              all(stops)),
        Claim("ResNet-50 on ImageNet", "the same ordering", "not run: too large", None),
        Claim("the effective dimension settles in a few steps, to 5%", f"≤ {FEW} steps",
              f"{listed(settle, '{}')} of {listed(steps, '{}')} steps",
              max(settle) <= FEW if min(n - k for n, k in zip(steps, settle, strict=True)) > 1 else None),
    ]  # fmt: skip
