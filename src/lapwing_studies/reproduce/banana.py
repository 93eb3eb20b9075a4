"""The banana dataset: uncertainty of MAP, sampled and linearised networks, and the effect of depth.

After figure 4 of Immer, Korzepa and Bauer (2021): two-dimensional data, tanh layers of 50 units, full Laplace–GGN. The
precision is the one with the best validation NLL of the GLM. Without the dataset, synthetic bananas are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lapwing import metrics
from lapwing_studies.reproduce import uci
from lapwing_studies.reproduce.claims import Claim, listed
from lapwing_studies.reproduce.immer_methods import COARSE, Case
from lapwing_studies.reproduce.many import train_many
from lapwing_studies.reproduce.parts import Scaling, Split, shuffled
from lapwing_studies.reproduce.study import Record, Study

DEPTHS = (1, 2, 3)
WIDTH = 50
N_TRAIN, N_EPOCHS = 1000, 1000
REACH, N_GRID = 5.0, 61
FAR = 4.0  # distance from the nearest datum


def run(study: Study) -> Record:
    return study.record("banana", [BananaJob(study)])


def synthetic(n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Two crescent-shaped clouds, one inside the other, standardised."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    t = 2.6 * (torch.rand(n, generator=generator) - 0.5)
    bent = torch.stack([t, 0.9 * t.square() - 1.2 * y], dim=1)
    x = bent + 0.3 * torch.randn(n, 2, generator=generator)
    return Scaling.of(x)(x), y


@dataclass(frozen=True)
class BananaJob:
    study: Study
    name: str = "banana"

    @property
    def made_with(self) -> str:
        return f"{self.source} | {self.n_train} rows | {self.n_epochs} epochs | depths {DEPTHS}"

    @property
    def n_epochs(self) -> int:
        return 5 if self.study.effort.name == "toy" else N_EPOCHS

    @property
    def n_train(self) -> int:
        return min(N_TRAIN, self.study.effort.n_train)

    @property
    def source(self) -> str:
        return "banana" if self.study.folder.holds(uci.FILE) else "made-up bananas"

    @cached_property
    def data(self) -> uci.UciSplit:
        if self.source == "banana":
            found = uci.split(self.study.folder, "banana", 0)
            some = shuffled(len(found.train), seed=0)[: self.n_train]
            return uci.UciSplit(found.train.rows(some), found.validation, found.test, 2)
        x, y = synthetic(3 * self.n_train, seed=0)
        third = [slice(i * self.n_train, (i + 1) * self.n_train) for i in range(3)]
        train, validation, test = (Split(x[rows], y[rows]) for rows in third)
        return uci.UciSplit(train, validation, test, 2)

    def run(self) -> Record:
        """Maps have rows of increasing x₂, for the network with two layers."""
        rows, shown = [], None
        for depth in DEPTHS:
            case, row = self._best(depth)
            rows.append(row)
            shown = case if depth == 2 else shown
        assert shown is not None
        axis = torch.linspace(-REACH, REACH, N_GRID)
        grid = torch.cartesian_prod(axis, axis).flip(1)  # rows of x₂ from below
        maps = self._maps(shown, grid)
        distance = torch.cdist(grid, self.data.train.x).amin(1)
        epistemic = maps["GLM epistemic"]
        on_data: Any = shown.full.predict(self.data.test.x, link="quadrature")
        return Record(
            source=self.source,
            n_train=len(self.data.train),
            rows=rows,
            axis=_rounded(axis),
            maps={name: [_rounded(line) for line in values.reshape(N_GRID, N_GRID)] for name, values in maps.items()},
            points=[_rounded(x) for x in self.data.test.x[:300]],
            labels=self.data.test.y[:300].tolist(),
            epistemic_far=float(epistemic[distance > FAR].mean()),
            epistemic_data=float(on_data.class_variance.epistemic.flatten().median()),
        )

    def _best(self, depth: int) -> tuple[Case, Record]:
        """The precision with the best validation NLL of the GLM."""
        widths = (2, *[WIDTH] * depth, 1)
        models = train_many(
            widths, self.data.train, self.data.summed_loss, torch.tensor(COARSE), n_epochs=self.n_epochs, seed=0
        )
        cases = [Case(self.data, model, precision) for precision, model in zip(COARSE, models, strict=True)]
        found = [self._nlls(case, case.linearised(case.full)) for case in cases]
        best = min(range(len(cases)), key=lambda i: found[i][0])
        case = cases[best]
        row = Record(
            depth=depth,
            precision=case.precision,
            map_nll=self._nlls(case, case.network())[1],
            bnn_nll=self._nlls(case, case.sampled())[1],
            glm_nll=found[best][1],
        )
        return case, row

    def _nlls(self, case: Case, log_probs: Tensor) -> tuple[float, float]:
        """NLL on validation and test rows."""
        n, y = len(self.data.validation), torch.cat([self.data.validation.y, self.data.test.y])
        observed = log_probs.gather(1, y[:, None])[:, 0]
        return metrics.nll(observed[:n]), metrics.nll(observed[n:])

    def _maps(self, case: Case, grid: Tensor) -> dict[str, Tensor]:
        glm: Any = case.full.predict(grid, link="quadrature")
        bnn: Any = case.full.predict(grid, predictive="bnn", n_samples=300)
        with torch.no_grad():
            network = torch.sigmoid(case.model(grid))
        split = glm.class_variance
        return {
            "MAP": network.flatten(),
            "BNN": bnn.probs.flatten(),
            "GLM": glm.probs.flatten(),
            "GLM aleatoric": split.aleatoric.flatten(),
            "GLM epistemic": split.epistemic.flatten(),
        }


def _rounded(values: Tensor) -> list[float]:
    return [round(v, 4) for v in values.detach().double().flatten().tolist()]


def claims(record: Record) -> list[Claim]:
    rows, run = record["runs"][0]["rows"], record["runs"][0]
    glm, bnn = ([row[key] for row in rows] for key in ("glm_nll", "bnn_nll"))
    times = run["epistemic_far"] / run["epistemic_data"]
    washed = fmean(abs(p - 0.5) < 0.2 for line in run["maps"]["BNN"] for p in line)
    return [
        Claim("GLM has a better NLL than sampled weights, at every depth", "better",
              f"{listed(glm)} against {listed(bnn)}", all(a < b for a, b in zip(glm, bnn, strict=True))),
        Claim("sampled weights become worse with depth", "worse",
              f"{listed(bnn)} (chance: 0.693)", all(a < b for a, b in pairwise(bnn))),
        Claim("the GLM does not", "within 0.02", listed(glm), max(glm) - min(glm) <= 0.02),
        Claim("GLM's epistemic variance grows away from the data", "≥ 5 times", f"{times:.0f} times", times >= 5),
        Claim("sampled weights wash the classes out: probabilities within 0.2 of one half", "almost everywhere",
              f"{washed:.0%} of the plane", washed >= 0.9),
    ]  # fmt: skip
