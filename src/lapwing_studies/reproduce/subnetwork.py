"""One-dimensional data with gaps: how much of the full posterior's variance subnetworks keep, by selection method.

After Daxberger et al. (2021): the network 1-50-50-1 has 2,600 weights; its biases stay as trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import metrics
from lapwing_studies.reproduce.architectures import mlp
from lapwing_studies.reproduce.batchnorm import GRID, NOISE_STD, PLACES, curve
from lapwing_studies.reproduce.claims import Claim, above, below
from lapwing_studies.reproduce.means import mean_of, where
from lapwing_studies.reproduce.parts import Parts, Scaling, Split
from lapwing_studies.reproduce.study import Record, Study
from lapwing_studies.reproduce.training import Recipe

N_PER_PLACE = 334
WIDTHS = (1, 50, 50, 1)
N_WEIGHTS = 2600
SIZES = (26, 78, 1300)
SCORES = ("swag", "variance", "functional", "magnitude", "random")
N_RANDOM = 5  # draws of random weights, whose standard deviations are averaged
RECIPE = Recipe(n_epochs=300, learning_rate=1e-2)


def run(study: Study) -> Record:
    return study.record("subnetwork-1d", [SubnetworkJob(seed, study) for seed in study.seeds])


def data() -> tuple[Split, Split]:
    """Half of the points for training, half for testing; the same in every run."""
    random = np.random.RandomState(0)
    x = np.concatenate([random.uniform(low, high, N_PER_PLACE) for low, high in PLACES])
    noise = random.randn(len(x))
    inputs = torch.from_numpy(x).float()[:, None]
    y = curve(inputs) + NOISE_STD * torch.from_numpy(noise).float()[:, None]
    order = torch.from_numpy(np.random.RandomState(42).permutation(len(x)))
    test, train = order[: len(x) // 2], order[len(x) // 2 :]
    return Split(inputs[train], y[train]), Split(inputs[test], y[test])


@dataclass(frozen=True)
class SubnetworkJob:
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"subnetwork-1d-{self.seed}"

    @property
    def made_with(self) -> str:
        return f"{self.recipe} | {SIZES} | {SCORES} | {self.n_snapshots} snapshots | seed {self.seed}"

    @property
    def toy(self) -> bool:
        return self.study.effort.name == "toy"

    @property
    def recipe(self) -> Recipe:
        return RECIPE.at_most(3) if self.toy else RECIPE

    @property
    def n_snapshots(self) -> int:
        return 3 if self.toy else 256

    @cached_property
    def raw(self) -> Split:
        return data()[0]

    @cached_property
    def scale_x(self) -> Scaling:
        return Scaling.of(self.raw.x)

    @cached_property
    def scale_y(self) -> Scaling:
        return Scaling.of(self.raw.y)

    @cached_property
    def split(self) -> Split:
        return Split(self.scale_x(self.raw.x), self.scale_y(self.raw.y))

    def trained(self) -> nn.Module:
        parts, loss = Parts(self.split, self.split, self.split, self.split.x[:0], "none"), nn.functional.mse_loss
        return self.study.network(self, lambda: mlp(WIDTHS, nn.ReLU), parts, self.recipe, loss)

    def run(self) -> Record:
        model, grid = self.trained(), torch.linspace(*GRID, 281)[:, None]
        tuned = lw.tune(self._fit(model, "regression", params="all", structure="full"), groups="one")
        likelihood: Any = tuned.likelihood
        precision, noise = float(tuned.prior.precisions[0].detach()), float(likelihood.noise_std.detach()[0])
        rows = [self._row(method, k, some, grid) for method, k, some in self._posteriors(model, precision, noise)]
        return Record(
            seed=self.seed,
            weights=N_WEIGHTS,
            precision=precision,
            noise_std=noise,
            n_train=len(self.split),
            train_x=_list(self.raw.x),
            train_y=_list(self.raw.y),
            grid=_list(grid),
            truth=_list(curve(grid)),
            rows=rows,
        )

    def _posteriors(
        self, model: nn.Module, precision: float, noise: float
    ) -> Iterator[tuple[str, int, list[lw.Posterior]]]:
        """Method, number of weights, and the posteriors over which the variance is averaged; all share prior and
        noise."""
        fixed: dict[str, Any] = {"likelihood": lw.Gaussian(noise_std=noise), "prior": precision}
        weights = ["*.weight"]
        yield "all weights", N_WEIGHTS, [self._fit(model, params=weights, structure="full", **fixed)]
        yield "diagonal", N_WEIGHTS, [self._fit(model, params=weights, structure="diag", **fixed)]
        last = lw.Subnetwork("last_layer", WIDTHS[-2], weights_only=True)
        yield "last layer", WIDTHS[-2], [self._fit(model, params=last, **fixed)]
        for score in SCORES:
            for k in SIZES:
                yield score, k, [self._fit(model, params=chosen, **fixed) for chosen in self._chosen(score, k)]

    def _chosen(self, score: str, k: int) -> list[lw.Subnetwork]:
        if score == "random":
            generators = [torch.Generator().manual_seed(seed) for seed in range(N_RANDOM)]
            return [lw.Subnetwork(lw.RandomScore(g), k, weights_only=True) for g in generators]
        by: Any = lw.Swag(n_snapshots=self.n_snapshots) if score == "swag" else score
        return [lw.Subnetwork(by, k, weights_only=True)]

    def _fit(self, model: nn.Module, likelihood: Any, **options: Any) -> lw.Posterior:
        return lw.fit(model, (self.split.x, self.split.y), likelihood, progress=False, **options)

    def _row(self, method: str, k: int, posteriors: list[lw.Posterior], grid: Tensor) -> Record:
        """`gap_std` and `data_std`: the mean epistemic standard deviation there, in units of the target's."""
        x, inside = grid[:, 0], (grid[:, 0] >= PLACES[0][0]) & (grid[:, 0] <= PLACES[-1][1])
        seen = torch.stack([(x >= low) & (x <= high) for low, high in PLACES]).any(0)
        predictions: list[Any] = [p.predict(self.scale_x(grid)) for p in posteriors]
        std = torch.stack([p.epistemic.detach()[:, 0].sqrt() for p in predictions]).mean(0)
        truth = self.scale_y(curve(grid))
        log_prob = torch.stack([p.log_prob(truth).detach().flatten() for p in predictions]).mean(0)
        gap = inside & ~seen
        return Record(
            method=method,
            k=k,
            gap_std=float(std[gap].mean()),
            data_std=float(std[seen].mean()),
            nll_gap=metrics.nll(log_prob[gap]),
            band=self._band(predictions[0]),
        )

    def _band(self, p: Any) -> Record:
        scale = self.scale_y
        return Record(mean=_list(p.mean * scale.std + scale.mean), std=_list(p.std * scale.std))


def _list(values: Tensor) -> list[float]:
    return [round(v, 5) for v in values.detach().double().flatten().tolist()]


def rows_of(record: Record, method: str, k: int) -> list[Record]:
    """By seed."""
    return [row for run in record["runs"] for row in where(run["rows"], method=method, k=k)]


def kept(record: Record, method: str, k: int) -> list[float]:
    """Standard deviation in the gaps relative to that of the full posterior, by seed."""
    pairs = zip(rows_of(record, method, k), rows_of(record, "all weights", N_WEIGHTS), strict=True)
    return [row["gap_std"] / full["gap_std"] for row, full in pairs]


def ratio(record: Record, method: str) -> float:
    """Standard deviation in the gaps relative to that on the data."""
    rows = rows_of(record, method, N_WEIGHTS)
    return mean_of(rows, "gap_std") / mean_of(rows, "data_std")


def claims(record: Record) -> list[Claim]:
    half = fmean(kept(record, "swag", SIZES[-1]))
    swag, random = ([fmean(kept(record, score, k)) for k in SIZES[:2]] for score in ("swag", "random"))
    ratios = [ratio(record, method) for method in ("diagonal", "all weights")]
    shown = [" and ".join(f"{v:.0%}" for v in values) for values in (swag, random)]
    last = fmean(kept(record, "last layer", WIDTHS[-2]))
    return [
        Claim("half of the weights keep nearly all uncertainty in the gaps", "≥ 80%", f"{half:.0%}", half >= 0.8),
        Claim("largest variances (SWAG) keep more than random weights at 1% and 3%", "more", " against ".join(shown),
              all(a > b for a, b in zip(swag, random, strict=True))),
        below("a diagonal posterior does not show the gaps (ratio of standard deviations, gaps to data)", *ratios,
              wanted="smaller than full", shown="{:.2f}"),
        above("3% of the weights keep more than the last layer", swag[1], last, wanted="more", shown="{:.0%}"),
    ]  # fmt: skip
