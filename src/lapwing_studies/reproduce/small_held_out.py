"""Tuning with 30, 100 and 300 held-out rows: does the choice account for the small number of data?

The rules were developed on seeds below 10 of these tables; the study uses seeds from 10 on.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce import scores
from lapwing_studies.reproduce.architectures import mlp, plain, seeded
from lapwing_studies.reproduce.parts import Parts, Scaling, Split, shuffled
from lapwing_studies.reproduce.study import Study, done
from lapwing_studies.reproduce.training import Loss, Recipe, train

FIRST_SEED = 10
SIZES = (30, 100, 300)  # of held-out rows
CLASSES = ("australian", "breast_cancer", "digits", "glass", "ionosphere", "satellite", "vehicle", "waveform")
NUMBERS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
HIDDEN = (30, 30)
_SHARE = 0.45  # largest share of rows that is held out
_SHORT, _LONG = Recipe(n_epochs=20, learning_rate=3e-3), Recipe(n_epochs=120, learning_rate=3e-3)
# One per seed, in turn: activation, normalisation, recipe, description.
KINDS = (
    (nn.Tanh, plain, _LONG, "tanh, trained long"),
    (nn.ReLU, nn.BatchNorm1d, _LONG, "ReLU BatchNorm, trained long"),
    (nn.ReLU, nn.LayerNorm, _SHORT, "ReLU LayerNorm, trained briefly"),
    (nn.Tanh, plain, _SHORT, "tanh, trained briefly"),
)


class HeldOutRow(TypedDict):
    """Test NLL per row after tuning with the first n held-out rows; `moved`: whether the mean left the network's."""

    n: int
    network: float
    temperature: float
    tuned: float
    moved: bool
    chosen: str


class HeldOutRun(TypedDict):
    data: str
    seed: int
    kind: str
    network: str
    n_train: int
    n_test: int
    rows: list[HeldOutRow]


class HeldOutRecord(TypedDict):
    study: str
    effort: str
    n_seeds: int
    runs: list[HeldOutRun]


def run(study: Study) -> HeldOutRecord:
    for archive in ("uci_classification", "uci_regression"):
        study.folder.check(archive)
    jobs = [HeldOutJob(name, FIRST_SEED + k, study) for name in (*CLASSES, *NUMBERS) for k in study.seeds]
    runs = done(study, jobs)
    return HeldOutRecord(study="small-held-out", effort=study.effort.name, n_seeds=study.n_seeds, runs=runs)


@dataclass(frozen=True)
class HeldOutJob:
    """One table at one seed: a network, tuned with nested held-out sets of every size."""

    data: str
    seed: int
    study: Study

    @property
    def name(self) -> str:
        return f"{self.data}-{self.seed}"

    @property
    def made_with(self) -> str:
        effort, (_, _, recipe, words) = self.study.effort, self.kind
        recipe = recipe.at_most(effort.n_epochs)
        return f"MLP {HIDDEN} {words} | {recipe} | {effort.n_train} rows, {effort.n_test} tested | seed {self.seed}"

    @property
    def kind(self) -> tuple[type[nn.Module], type[nn.Module], Recipe, str]:
        return KINDS[self.seed % len(KINDS)]  # type: ignore[return-value]

    @property
    def classes(self) -> bool:
        return self.data in CLASSES

    @cached_property
    def parts(self) -> Parts:
        """A quarter is tested; the largest held-out size that is at most 45 % of the rows."""
        archive = "uci_classification" if self.classes else "uci_regression"
        x, y = (torch.from_numpy(v) for v in self.study.folder.arrays(archive, [f"{self.data}_{k}" for k in "xy"]))
        order, effort = shuffled(len(y), seed=self.seed), self.study.effort
        n_test = min(len(y) // 4, effort.n_test)
        n_held_out = max(size for size in SIZES if size <= _SHARE * len(y))
        test, held_out, learnt = order[:n_test], order[n_test:][:n_held_out], order[n_test + n_held_out :]
        return self._scaled(x.float(), y, (learnt[: effort.n_train], held_out, test))

    def _scaled(self, x: Tensor, y: Tensor, rows: tuple[Tensor, Tensor, Tensor]) -> Parts:
        scale = Scaling.of(x[rows[0]])
        y = y.long() if self.classes else Scaling.of(y[rows[0]].float()[:, None])(y.float()[:, None])
        learnt, held_out, test = (Split(scale(x[r]), y[r]) for r in rows)
        return Parts(learnt, held_out, test, test.x, "nothing")

    def network(self) -> nn.Module:
        activation, norm, recipe, _ = self.kind
        n_classes = self.parts.n_classes if self.classes else 1
        widths = [self.parts.train.x.shape[1], *HIDDEN, n_classes if n_classes > 2 else 1]
        model = seeded(lambda: mlp(widths, activation, norm), seed=self.seed)
        if not self.study.store.load_weights(self.name, self.made_with, model):
            train(model, self.parts, self._loss(n_classes), recipe.at_most(self.study.effort.n_epochs), seed=self.seed)
            self.study.store.keep_weights(self.name, self.made_with, model)
        return model.eval()

    def _loss(self, n_classes: int) -> Loss:
        if not self.classes:
            return nn.functional.mse_loss
        if n_classes > 2:
            return nn.functional.cross_entropy
        return lambda f, y: nn.functional.binary_cross_entropy_with_logits(f[:, 0], y.to(f))

    def run(self) -> HeldOutRun:
        model, parts = self.network(), self.parts
        likelihood = "classification" if self.classes else "regression"
        posterior = lw.fit(model, (parts.train.x, parts.train.y), likelihood, progress=False)
        return HeldOutRun(
            data=self.data,
            seed=self.seed,
            kind=likelihood,
            network=self.kind[-1],
            n_train=len(parts.train),
            n_test=len(parts.test),
            rows=[self._row(model, posterior, n) for n in SIZES if n <= len(parts.validation)],
        )

    def _row(self, model: nn.Module, posterior: lw.Posterior, n: int) -> HeldOutRow:
        parts = replace(self.parts, validation=self.parts.validation.rows(slice(n)))
        learnt, held_out = ((s.x, s.y) for s in (parts.train, parts.validation))
        with warnings.catch_warnings():  # naval has columns that are constant
            warnings.simplefilter("ignore")
            tuned = lw.tune(posterior, learnt, validation=held_out, progress=False)
        made = (*self._baselines(model, parts), scores.of_posterior(tuned, parts, classes=self.classes))
        network, temperature, ours = (each.score("", parts.test.y)["nll"] for each in made)
        return HeldOutRow(
            n=n,
            network=network,
            temperature=temperature,
            tuned=ours,
            moved=tuned.readout.shift is not None,
            chosen=tuned.history[-1].note,
        )

    def _baselines(
        self, model: nn.Module, parts: Parts
    ) -> tuple[scores.Classes | scores.Numbers, scores.Classes | scores.Numbers]:
        """The plain network with noise from the training rows; and with temperature or noise from the held-out rows."""
        if not self.classes:
            return scores.map_numbers(model, parts, parts.train), scores.map_numbers(model, parts, parts.validation)
        best = scores.best_temperature(model, parts.validation)
        return scores.map_classes(model, parts), scores.map_classes(model, parts, temperature=best)
