"""Marginal-likelihood training against a prior chosen on held-out data (Immer and others, 2021b), and MacKay's loop.

Networks as in the paper's table, at three sizes; a grid of one prior precision is trained network by network and chosen
by held-out NLL, beside one training whose precisions follow the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log10
from statistics import fmean
from typing import Any

import torch
from torch import nn

import lapwing as lw
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.claims import Claim, every, listed
from lapwing_studies.reproduce.marglik_networks import NETWORKS
from lapwing_studies.reproduce.marglik_sine import SineJob
from lapwing_studies.reproduce.means import grouped
from lapwing_studies.reproduce.parts import Parts
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.variational import scored


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


def run(study: Study) -> Record:
    tier = TIERS[study.effort.name]
    tasks = [task for task in tier.tasks if sources.there(task[0], study.folder)]
    tasks = tasks or [("digits", "MLP"), ("digits", "CNN")]
    jobs: list[Any] = [TaskJob(study, tier, *task, seed) for task in tasks for seed in study.seeds]
    record = study.record("marglik", [*jobs, SineJob(tier.sine_epochs)], n_train=tier.n_train, epochs=tier.epochs)
    return {**record, "runs": record["runs"][:-1], "sines": record["runs"][-1:]}


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

    def run(self) -> Record:
        """`grid`: held-out and test scores by precision; `trace`: epoch, evidence and precisions."""
        tier, folder = self.tier, self.study.folder
        parts = sources.images(self.data, folder, self.seed, tier.n_train, tier.n_test)
        best = self._marglik(parts)
        posterior = best.posterior
        return Record(
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


def chosen(run: Record) -> dict[str, Any]:
    """The precision of the grid with the best held-out NLL."""
    return min(run["grid"], key=lambda entry: entry["held_out"]["nll"])


def spread(run: Record) -> float:
    """How far apart the precisions of the layers are, in powers of ten."""
    return log10(max(run["precisions"]) / min(run["precisions"]))


def gain(run: Record) -> float:
    """Test log likelihood above that of the grid's choice."""
    return float(chosen(run)["test"]["nll"] - run["marglik"]["nll"])


def rises(run: Record) -> bool:
    return bool(run["trace"][-1]["log_evidence"] > run["trace"][0]["log_evidence"])


def claims(record: Record) -> list[Claim]:
    """Of all tasks of the record, means over seeds."""
    tasks = grouped(record["runs"], "data", "network").values()
    gains = [fmean(map(gain, runs)) for runs in tasks]
    apart = [10 ** fmean(map(spread, runs)) for runs in tasks]
    sine = record["sines"][0]["log_evidence"]
    return [
        Claim("test log likelihood at least that of the grid's choice less 0.01", "≥ −0.01", listed(gains, "{:+.3f}"),
              min(gains) >= -0.01),
        Claim("precisions of the layers differ by more than ten times", "> 10", listed(apart, "{:.1f}"),
              min(apart) > 10),
        every("the evidence rises along the way", [rises(run) for run in record["runs"]]),
        Claim("values of the table", "the table", "not run: networks and data of the paper", None),
        Claim("MacKay's 1-6-1 network ends at its log evidence, within 0.05", "-0.504", f"{sine:.3f}",
              abs(sine + 0.504) < 0.05),
    ]  # fmt: skip
