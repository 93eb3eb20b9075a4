"""Table 1 of Immer, Korzepa and Bauer (2021): linearised, sampled and refined posteriors on UCI classification sets.

For every split a network is trained under each of several prior precisions. Every method uses the one with the best
validation NLL, and is scored on the test rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lapwing import metrics
from lapwing_studies.reproduce import uci
from lapwing_studies.reproduce.architectures import mlp
from lapwing_studies.reproduce.immer_methods import (
    CLASSES_REFINED,
    GRID,
    LEAST_REFINED,
    N_SAMPLES,
    PARTS,
    REFINED,
    UPPER,
    Case,
)
from lapwing_studies.reproduce.many import train_many
from lapwing_studies.reproduce.study import Record, Study, timed

N_EPOCHS = 1000
SMALLEST = math.log(1e-7)  # lower limit of log probabilities, as published
FIRST, LAST = ("plain", "refine", "gp", "refine-d"), ("mode",)
MEAN_FIELD = ("mean-field",)


def run(study: Study) -> Record:
    return study.record("immer2021-uci", jobs(study))


def jobs(study: Study) -> list[ImmerJob]:
    """All methods on one split of every dataset before the next split, so that an interrupted study has a complete
    table.

    The two large datasets come last, followed by GLM mode, which is not in the paper, and mean-field inference.
    """
    small = tuple(name for name in uci.NAMES if name not in uci.LARGE)
    rounds = [(small, FIRST), (uci.LARGE, FIRST), (small, LAST), (uci.NAMES, MEAN_FIELD)]
    return [
        ImmerJob(name, number, part, study)
        for names, parts in rounds
        for number in range(study.n_seeds)
        for name in names
        if number < n_splits(study, name)
        for part in parts
    ]


def n_splits(study: Study, name: str) -> int:
    """A quick run leaves out the two large datasets."""
    left_out = name in uci.LARGE and study.effort.name != "full"
    return 0 if left_out else min(study.n_seeds, len(uci.SEEDS))


@dataclass(frozen=True)
class ImmerJob:
    """Some of the methods on one split of one dataset."""

    set_name: str
    number: int
    part: str
    study: Study

    @property
    def seed(self) -> int:
        return uci.SEEDS[self.number]

    @property
    def name(self) -> str:
        return f"{self.set_name}-{self.seed}-{self.part}"

    @property
    def made_with(self) -> str:
        steps = f" | {REFINED} steps" if self.part == "refine" else ""
        several = f" | of classes {CLASSES_REFINED}" if self.part.startswith("refine") else ""
        return f"{self._trained_with} | {self.part} from {LEAST_REFINED} | {N_SAMPLES} samples{several}{steps}"

    @property
    def _trained_with(self) -> str:
        return f"{self.n_epochs} epochs | precisions {self.precisions} | seed {self.seed}"

    @property
    def n_epochs(self) -> int:
        return 5 if self.study.effort.name == "toy" else N_EPOCHS

    @property
    def precisions(self) -> tuple[float, ...]:
        return UPPER if self.set_name in uci.LARGE else GRID

    @cached_property
    def data(self) -> uci.UciSplit:
        return uci.split(self.study.folder, self.set_name, self.number)

    def run(self) -> Record:
        (gradients, scores), seconds = timed(self._scored)
        return Record(
            name=self.set_name,
            seed=self.seed,
            part=self.part,
            weights=sum(p.numel() for p in self.trained()[0].parameters()),
            largest_gradient=max(gradients, default=None),
            seconds=seconds,
            scores=scores,
        )

    def _scored(self) -> tuple[list[float], list[Record]]:
        gradients, scores = [], []
        for precision, model in zip(self.precisions, self.trained(), strict=True):
            case = Case(self.data, model, precision)
            for method, log_probs in PARTS[self.part](case):
                scores.append(self._score(method, precision, log_probs))
            if self.part == "plain":
                gradients.append(case.largest_gradient)
        return gradients, scores

    def trained(self) -> list[nn.Module]:
        """A network for every precision; stored, so that other methods start from the same networks."""
        store, names = self.study.store, [f"{self.set_name}-{self.seed}-{p:.4g}" for p in self.precisions]
        kept = [mlp(self.data.widths, nn.Tanh) for _ in names]
        if all(store.load_weights(n, self._trained_with, model) for n, model in zip(names, kept, strict=True)):
            return [model.eval() for model in kept]
        models = train_many(
            self.data.widths,
            self.data.train,
            self.data.summed_loss,
            torch.tensor(self.precisions),
            n_epochs=self.n_epochs,
            seed=self.seed,
        )
        for name, model in zip(names, models, strict=True):
            store.keep_weights(name, self._trained_with, model)
        return models

    def _score(self, method: str, precision: float, log_probs: Tensor) -> Record:
        """From log p(c | x) (n, C) of validation and test rows."""
        n, y = len(self.data.validation), torch.cat([self.data.validation.y, self.data.test.y])
        found = log_probs.gather(1, y[:, None])[:, 0].clamp(min=SMALLEST)
        probs, test = log_probs[n:].exp(), self.data.test.y
        return Record(
            method=method,
            precision=precision,
            validation=metrics.nll(found[:n]),
            nll=metrics.nll(found[n:]),
            accuracy=metrics.accuracy(probs, test),
            ece=metrics.ece(probs, test),
        )
