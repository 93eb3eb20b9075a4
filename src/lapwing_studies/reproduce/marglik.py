"""Marginal-likelihood training against a prior chosen on held-out data (Immer and others, 2021b), and MacKay's loop.

Networks as in the paper's table, at three sizes; a grid of one prior precision is trained network by network and chosen
by held-out NLL, beside one training whose precisions follow the evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import log10, sin
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.claims import Claim
from lapwing_studies.reproduce.effort import Effort
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.study import Study, done
from lapwing_studies.reproduce.variational import Scores, scored


class Scaled(nn.Module):
    """A learned scale and shift of all entries, as Fixup has in place of norms (Zhang, Dauphin and Ma, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


class FixupBlock(nn.Module):
    """Two convolutions beside the identity; the second starts at zero."""

    def __init__(self, before: int, after: int, stride: int, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.scaled, self.between = Scaled(), Scaled()
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()
        with torch.no_grad():
            self.conv1.weight.mul_(depth**-0.5)
            self.conv2.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.between(self.conv1(x)))
        return torch.tanh(self.shortcut(x) + self.scaled(self.conv2(h)))


def mlp(channels: int, side: int, n_classes: int) -> nn.Module:
    sizes = (channels * side * side, 128, 64)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]), nn.Tanh(),
        nn.Linear(sizes[2], n_classes),
    )  # fmt: skip


def cnn(channels: int, side: int, n_classes: int) -> nn.Module:
    after = ((side - 3) // 2 + 1 - 3) // 2 + 1
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2), nn.Tanh(), nn.Conv2d(16, 32, 3, 2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(32 * after * after, 64), nn.Tanh(), nn.Linear(64, n_classes)),
    )


def fixup_resnet(channels: int, side: int, n_classes: int) -> nn.Module:
    """Three stages of two blocks, without batch normalisation."""
    widths = (16, 16, 16, 32, 32, 64, 64)
    blocks = [FixupBlock(a, b, 2 if b > a else 1, len(widths) - 1) for a, b in pairwise(widths)]
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 1, 1), nn.Tanh(), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, n_classes)),
    )


Network = Callable[[int, int, int], nn.Module]
NETWORKS: dict[str, Network] = {"MLP": mlp, "CNN": cnn, "ResNet": fixup_resnet}


@dataclass(frozen=True)
class Tier:
    """How large the study is: data, epochs, and when the evidence is looked at."""

    n_train: int
    n_test: int
    epochs: int
    start: int
    every_epochs: int
    steps: int
    tasks: tuple[tuple[str, str], ...]
    n_grid: int = 6
    sine_epochs: int = 20_000


_GREY = (("mnist", "MLP"), ("mnist", "CNN"), ("fashion_mnist", "MLP"), ("fashion_mnist", "CNN"))
_ALL = (*_GREY, ("cifar10", "CNN"), ("cifar10", "ResNet"))
TIERS = {
    "toy": Tier(96, 48, 4, 1, 2, 3, _GREY[:1], 2, 40),
    "quick": Tier(1_000, 2_000, 40, 10, 5, 50, (*_GREY[:1], *_GREY[2:]), sine_epochs=8_000),
    "full": Tier(10_000, 10_000, 60, 10, 5, 50, _ALL),
    "faithful": Tier(60_000, 10_000, 250, 0, 1, 100, _ALL),
}


class MarglikRun(TypedDict):
    """`grid`: held-out and test scores by precision; `trace`: epoch, evidence and precisions."""

    data: str
    network: str
    seed: int
    grid: list[dict[str, Any]]
    marglik: Scores
    marglik_glm: Scores
    groups: list[str]
    precisions: list[float]
    trace: list[dict[str, Any]]


class SineRun(TypedDict):
    """MacKay's 1-6-1 network: γ, α, β, noise and evidence at the end."""

    hidden: int
    gamma: float
    alpha: float
    beta: float
    noise_std: float
    log_evidence: float
    rmse: float


class MarglikRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    n_train: int
    epochs: int
    runs: list[MarglikRun]
    sines: list[SineRun]


def run(study: Study) -> MarglikRecord:
    tier = TIERS[study.effort.name]
    tasks = [task for task in tier.tasks if _there(study, task[0])] or [("digits", "MLP"), ("digits", "CNN")]
    jobs: list[Any] = [TaskJob(study, tier, *task, seed) for task in tasks for seed in study.seeds]
    found = done(study, [*jobs, SineJob(tier)])
    return MarglikRecord(
        study="marglik",
        effort=study.effort.name,
        n_seeds=study.n_seeds,
        n_train=tier.n_train,
        epochs=tier.epochs,
        runs=found[:-1],
        sines=[found[-1]],
    )


def _there(study: Study, name: str) -> bool:
    files = ("cifar10_train_a", "cifar10_test") if name == "cifar10" else (name,)
    return all(study.folder.holds(file) for file in files)


@dataclass(frozen=True)
class TaskJob:
    study: Study
    tier: Tier
    data: str
    network: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data} {self.network} {self.seed}"

    @property
    def made_with(self) -> str:
        return f"{self.tier} v1"

    def run(self) -> MarglikRun:
        parts = data_of(self.data, self.study, self.tier, self.seed)
        best = self._marglik(parts)
        posterior = best.posterior
        return MarglikRun(
            data=self.data,
            network=self.network,
            seed=self.seed,
            grid=[self._of_precision(parts, v) for v in torch.logspace(-2, 3, self.tier.n_grid).tolist()],
            marglik=scored(posterior.predict(parts.test.x, predictive="mean").probs, parts.test.y),
            marglik_glm=scored(posterior.predict(parts.test.x).probs, parts.test.y),
            groups=list(posterior.prior.group_names),
            precisions=posterior.prior.precisions.detach().tolist(),
            trace=[
                {"epoch": r.epoch, "log_evidence": r.log_evidence, "precisions": list(r.precisions)}
                for r in best.history
                if r.log_evidence is not None
            ],
        )

    def _marglik(self, parts: Parts) -> lw.train.Run:
        tier = self.tier
        return lw.train.marglik(
            self._model(parts),
            (parts.train.x, parts.train.y),
            "classification",
            epochs=tier.epochs,
            start=tier.start,
            every_epochs=tier.every_epochs,
            steps=tier.steps,
            generator=torch.Generator().manual_seed(self.seed),
            checkpoint=self.study.store.folder / "unfinished" / self.name.replace(" ", "-"),
            progress=False,
        )

    def _of_precision(self, parts: Parts, precision: float) -> dict[str, Any]:
        """One precision for all weights, trained as the other is."""
        model, n = self._model(parts), self.tier.epochs * -(-len(parts.train) // 128)
        lw.train.map(
            model,
            (parts.train.x, parts.train.y),
            "classification",
            epochs=self.tier.epochs,
            prior=precision**-0.5,
            schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, n, 1e-6),
            schedule_every="step",
            generator=torch.Generator().manual_seed(self.seed),
            progress=False,
        )
        with torch.no_grad():
            model.eval()
            held_out, test = model(parts.validation.x).softmax(-1), model(parts.test.x).softmax(-1)
        return {
            "precision": precision,
            "held_out": scored(held_out, parts.validation.y),
            "test": scored(test, parts.test.y),
        }

    def _model(self, parts: Parts) -> nn.Module:
        torch.manual_seed(self.seed)
        channels, side = parts.train.x.shape[1:3]
        return NETWORKS[self.network](channels, side, parts.n_classes)


@dataclass(frozen=True)
class SineJob:
    """41 points of a sine, tanh units, α and β by the evidence: MacKay's loop (1992), with the library's training."""

    tier: Tier
    hidden: int = 6
    name: str = "sine 1-6-1"

    @property
    def made_with(self) -> str:
        return f"{self.hidden} {self.tier.sine_epochs} v1"

    def run(self) -> SineRun:
        found = [self._run(seed) for seed in range(2)]
        return max(found, key=lambda run: run["log_evidence"])

    def _run(self, seed: int) -> SineRun:
        torch.manual_seed(seed)
        x = torch.linspace(-1, 1, 41, dtype=torch.float64)[:, None]
        truth = torch.tensor([[sin(2 * torch.pi * float(v))] for v in x], dtype=torch.float64)
        y = truth + 0.1 * torch.from_numpy(np.random.default_rng(0).normal(size=41))[:, None]
        model = nn.Sequential(nn.Linear(1, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1)).double()
        epochs = self.tier.sine_epochs
        run = lw.train.marglik(
            model,
            [(x, y)],
            "regression",
            epochs=epochs,
            structure="full",
            fisher="exact",
            groups="one",
            precision=0.01,
            start=epochs // 4,
            every_epochs=max(5, epochs // 40),
            steps=50,
            lr=0.03,
            lr_min=1e-4,
            progress=False,
        )
        posterior = run.posterior
        likelihood: Any = posterior.likelihood
        noise, alpha = float(likelihood.resolved()), float(posterior.prior.precisions)
        with torch.no_grad():
            rmse = float((model(x) - truth).square().mean().sqrt())
        return SineRun(
            hidden=self.hidden,
            gamma=float(posterior.effective_dimension().sum()),
            alpha=alpha,
            beta=noise**-2,
            noise_std=noise,
            log_evidence=float(posterior.log_evidence()),
            rmse=rmse,
        )


def chosen(run: MarglikRun) -> dict[str, Any]:
    """The precision of the grid with the best held-out NLL."""
    return min(run["grid"], key=lambda entry: entry["held_out"]["nll"])


def spread(run: MarglikRun) -> float:
    """How far apart the precisions of the layers are, in powers of ten."""
    return log10(max(run["precisions"]) / min(run["precisions"]))


def claims(record: MarglikRecord) -> list[Claim]:
    """Of all tasks of the record."""
    gains = [chosen(run)["test"]["nll"] - run["marglik"]["nll"] for run in record["runs"]]
    apart = [10 ** spread(run) for run in record["runs"]]
    rising = [run["trace"][-1]["log_evidence"] > run["trace"][0]["log_evidence"] for run in record["runs"]]
    n, sine = len(record["runs"]), record["sines"][0]
    return [
        Claim(
            "test log likelihood at least that of the grid's choice less 0.01", "≥ −0.01",
            ", ".join(f"{gain:+.3f}" for gain in gains), min(gains) >= -0.01,
        ),
        Claim(
            "precisions of the layers differ by more than ten times", "> 10",
            ", ".join(f"{v:.1f}" for v in apart), min(apart) > 10,
        ),
        Claim("the evidence rises along the way", f"{n} of {n}", f"{sum(rising)} of {n}", all(rising)),
        Claim(
            "MacKay's 1-6-1 network ends at its log evidence, within 0.05", "-0.504", f"{sine['log_evidence']:.3f}",
            abs(sine["log_evidence"] + 0.504) < 0.05,
        ),
    ]  # fmt: skip


def data_of(name: str, study: Study, tier: Tier, seed: int) -> Parts:
    effort = Effort(study.effort.name, tier.n_train, tier.n_test, tier.epochs, study.n_seeds)
    if name == "digits":
        return sources.digits(study.folder, seed, effort)
    if name == "cifar10":
        return sources.colour_images(study.folder, seed, effort)
    return sources.grey_images(name, "fashion_mnist" if name == "mnist" else "mnist", study.folder, seed, effort)
