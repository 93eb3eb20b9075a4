"""Variational Laplace against MAP and mean-field inference, over temperatures and learning-rate multipliers.

After Unlu and Aitchison, "Variational Laplace for Bayesian neural networks": table 1, figure 2. Three sizes: minutes,
an hour or two on a CPU, and the paper's network and epochs for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

import lapwing as lw
from lapwing import metrics
from lapwing_studies.reproduce import sources
from lapwing_studies.reproduce.parts import Parts, Split
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.variational_networks import preact_resnet18, small_cnn

BETAS = (0.01, 0.03, 0.1, 0.3, 1.0)
MULTIPLIERS = (1.0, 3.0, 10.0, 30.0)
METHODS = ("MAP", "VI", "VL")


@dataclass(frozen=True)
class Tier:
    """How large the study is. The learning rate falls to a tenth after each of `drops`."""

    n_train: int
    n_test: int
    epochs: int
    batch: int
    lr: float
    drops: tuple[int, int]
    network: Callable[[int, int, int], nn.Module]
    sets: tuple[str, ...] = ("fashion_mnist",)


TIERS = {
    "toy": Tier(96, 48, 2, 32, 1e-3, (1, 2), small_cnn),
    "quick": Tier(2_000, 2_000, 24, 50, 1e-3, (15, 20), small_cnn),
    "full": Tier(10_000, 10_000, 30, 128, 1e-3, (15, 23), small_cnn),
    "faithful": Tier(60_000, 10_000, 200, 128, 1e-4, (100, 150), preact_resnet18, ("fashion_mnist", "cifar10")),
}


def run(study: Study) -> Record:
    tier = TIERS[study.effort.name]
    names = [name for name in tier.sets if sources.there(name, study.folder)] or ["digits"]
    jobs = [
        TrainJob(study, tier, name, method, beta, 10.0, seed)
        for name in names
        for seed in study.seeds
        for beta in BETAS
        for method in METHODS
    ]
    jobs += [
        TrainJob(study, tier, names[0], method, 1.0, multiplier, 0)
        for multiplier in MULTIPLIERS
        if multiplier != 10.0
        for method in ("VI", "VL")
    ]
    facts = Record(data=names, n_train=tier.n_train, epochs=tier.epochs)
    return study.record("variational-laplace", jobs, **facts, betas=list(BETAS), multipliers=list(MULTIPLIERS))


@dataclass(frozen=True)
class TrainJob:
    """One training, scored at the means and, by draws of the weights, where it is mean-field inference."""

    study: Study
    tier: Tier
    data: str
    method: str
    beta: float
    multiplier: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.data} {self.method} {self.beta:g} x{self.multiplier:g} {self.seed}"

    @property
    def made_with(self) -> str:
        t = self.tier
        return f"{t.n_train} {t.n_test} {t.epochs} {t.batch} {t.lr} {t.drops} {t.network.__name__} v1"

    def run(self) -> Record:
        """`scores` and `held_out` by way of predicting: "mean", and "draws" where there are any."""
        parts = data_of(self.data, self.study, self.tier, self.seed)
        run, seconds = self._trained(parts)
        posterior = run.posterior
        elbo = None if posterior.trained is None else posterior.trained.elbo
        trained = posterior.trained if self.method != "MAP" else None
        return Record(
            data=self.data,
            method=self.method,
            beta=self.beta,
            multiplier=self.multiplier,
            seed=self.seed,
            scores=self._scores(posterior, parts.test),
            held_out=self._scores(posterior, parts.validation),
            elbo=elbo,
            seconds=seconds,
            reverted=None if trained is None else trained.reverted,
            unmoved=None if trained is None else trained.unmoved,
            log_ratio={} if trained is None else log_ratios(posterior),
        )

    def _trained(self, parts: Parts) -> tuple[lw.train.Run, float]:
        """The run, and its seconds per epoch."""
        torch.manual_seed(self.seed)
        channels, side = parts.train.x.shape[1:3]
        model = self.tier.network(channels, side, parts.n_classes)
        loops: dict[str, Any] = {
            "MAP": partial(lw.train.map, structure="diag"),
            "VI": lw.train.mean_field,
            "VL": lw.train.variational_laplace,
        }
        run = loops[self.method](
            model,
            (parts.train.x, parts.train.y),
            "classification",
            epochs=self.tier.epochs,
            lr=self.tier.lr,
            beta=self.beta,
            multiplier=self.multiplier,
            batch_size=self.tier.batch,
            schedule=lambda optimizer: MultiStepLR(optimizer, list(self.tier.drops)),
            checkpoint=self.study.store.folder / "unfinished" / self.name.replace(" ", "-"),
            generator=torch.Generator().manual_seed(self.seed),
            progress=False,
        )
        return run, sum(record.seconds for record in run.history) / len(run.history)

    def _scores(self, posterior: lw.Posterior, split: Split) -> dict[str, Record]:
        found = {"mean": scored(posterior.predict(split.x, predictive="mean").probs, split.y)}
        if self.method == "VI":
            found["draws"] = scored(posterior.predict(split.x, predictive="bnn", n_samples=10).probs, split.y)
        return found


def scored(probs: Tensor, y: Tensor) -> Record:
    picked = probs.double().gather(-1, y[:, None]).clamp(min=1e-12)
    return Record(
        nll=-float(picked.log().mean()), accuracy=metrics.accuracy(probs, y), ece=metrics.ece(probs, y, n_bins=10)
    )


def log_ratios(posterior: lw.Posterior) -> dict[str, list[float]]:
    """log σ/s by tensor, at 41 quantiles: what a picture needs."""
    ratio = 0.5 * (posterior.marginal_variance().double() * posterior.prior.P0.diagonal).log()
    at = torch.linspace(0, 1, 41, dtype=torch.float64)
    return {
        name: [round(v, 4) for v in torch.quantile(ratio[s], at).tolist()]
        for name, s in posterior.layout.slices.items()
        if name.endswith("weight")
    }


def data_of(name: str, study: Study, tier: Tier, seed: int) -> Parts:
    """Pixels standardised by the training images. Without a folder, scikit-learn's digits."""
    parts = sources.images(name, study.folder, seed, tier.n_train, tier.n_test)
    mean, std = parts.train.x.mean(), parts.train.x.std()
    train, validation, test = (
        Split((part.x - mean) / std, part.y) for part in (parts.train, parts.validation, parts.test)
    )
    return Parts(train, validation, test, parts.outside, parts.outside_is)
