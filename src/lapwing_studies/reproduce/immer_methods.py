"""The methods of the table: each gives log p(c | x) of the held-out rows for one trained network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce.uci import UciSplit

GRID = tuple(10 ** (-2 + 4 * i / 9) for i in range(10))
COARSE = GRID[2::2]  # .0774, .599, 4.64, 35.9: for slow posteriors
UPPER = GRID[4:]  # from .599 on: the range in which precisions are usually chosen
N_SAMPLES = 1000
LEAST_REFINED = 0.5  # lower precisions are rarely chosen, and slowest to refine
CLASSES_REFINED = (1.0, 50.0)  # for several outputs: between these precisions
# Outputs of all training rows above which a step of the full variational posterior takes 20 seconds.
MANY_OUTPUTS = 5000
REFINED = {False: 15, True: 5}  # its number of steps, fewer for many outputs
MEAN_FIELD_STEPS = 800
AT_ONE = GRID[6]  # 4.64: if variational posteriors are fitted at a single precision

Scored = tuple[str, Tensor]  # a method's name, and its log probabilities (n, C)


@dataclass(frozen=True, eq=False)
class Case:
    """A network trained with one prior precision, which the posterior uses as well."""

    data: UciSplit
    model: nn.Module
    precision: float

    @cached_property
    def full(self) -> lw.Posterior:
        return self.fitted("full")

    def fitted(self, structure: Any) -> lw.Posterior:
        train, likelihood = self.data.train, self.data.likelihood
        return lw.fit(
            self.model, (train.x, train.y), likelihood, structure=structure, prior=self.precision, progress=False
        )

    @property
    def many_outputs(self) -> bool:
        return len(self.data.train) * self.data.n_outputs > MANY_OUTPUTS

    @property
    def variational(self) -> bool:
        """Whether variational posteriors are fitted here."""
        if self.many_outputs:
            return self.precision == AT_ONE
        least, most = (LEAST_REFINED, math.inf) if self.data.n_outputs == 1 else CLASSES_REFINED
        return least <= self.precision <= most

    @property
    def functional(self) -> bool:
        """Whether the Gaussian process is fitted here."""
        least, most = (AT_ONE, CLASSES_REFINED[1]) if self.many_outputs else (LEAST_REFINED, math.inf)
        return least <= self.precision <= most

    @property
    def largest_gradient(self) -> float:
        """Largest entry of the objective's gradient at the trained weights, where Adam rarely reaches a mode."""
        pull = self.precision * self.full.mean.double()
        return float((self.full.data_gradient() - pull).abs().max())

    def linearised(self, posterior: lw.Posterior) -> Tensor:
        link = "quadrature" if self.data.n_outputs == 1 else "mc"  # exact, or as published
        return _log_probs(posterior.predict(self.data.held_out, link=link, n_samples=N_SAMPLES))

    def sampled(self) -> Tensor:
        return _log_probs(self.full.predict(self.data.held_out, predictive="bnn", n_samples=N_SAMPLES))

    @torch.no_grad()
    def network(self) -> Tensor:
        f = self.model(self.data.held_out).double()
        if self.data.n_outputs > 1:
            return f.log_softmax(-1)
        return torch.cat([nn.functional.logsigmoid(-f), nn.functional.logsigmoid(f)], dim=1)


def _log_probs(prediction: Any) -> Tensor:
    log_probs: Tensor = prediction.log_probs.detach().double()
    return log_probs.reshape(len(log_probs), -1)


def plain(case: Case) -> Iterator[Scored]:
    yield "MAP", case.network()
    yield "BNN", case.sampled()
    yield "GLM", case.linearised(case.full)
    yield "GLM diag", case.linearised(case.fitted("diag"))


def at_the_mode(case: Case) -> Iterator[Scored]:
    """The mean at the mode of the linear model, with the curvature re-estimated there."""
    if case.precision >= LEAST_REFINED:
        yield "GLM mode", case.linearised(lw.refine(case.full, progress=False))


def diagonally_refined(case: Case) -> Iterator[Scored]:
    """The diagonal Gaussian variational posterior of the linear model, with the published settings."""
    if case.variational:
        refined = lw.refine(case.fitted("diag"), by="vi_diag", preset="immer2021", progress=False)
        yield "GLM refine d", case.linearised(refined)


def refined(case: Case) -> Iterator[Scored]:
    """The full-covariance one, after a few steps from the linear model's mode, which give most of the gain."""
    if case.variational:
        refined = lw.refine(case.full, by="vi", max_steps=REFINED[case.many_outputs], progress=False)
        yield "GLM refine", case.linearised(refined)


def gaussian_process(case: Case) -> Iterator[Scored]:
    """A Gaussian process with an independent kernel per output."""
    if case.functional:
        yield "GP", case.linearised(case.fitted(lw.GP(coupling="independent")))


def mean_field(case: Case) -> Iterator[Scored]:
    """Mean-field inference under the same prior, full batches; its means start from the trained network."""
    if case.variational or (not case.many_outputs and case.precision >= LEAST_REFINED):
        train, steps = case.data.train, MEAN_FIELD_STEPS
        found = lw.train.mean_field(
            deepcopy(case.model),
            (train.x, train.y),
            case.data.likelihood,
            epochs=steps,
            lr=1e-2,
            multiplier=2,
            prior=case.precision**-0.5,
            estimator="local",
            batch_size=len(train),
            schedule=lambda optimiser: torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps),
            generator=torch.Generator().manual_seed(0),
            progress=False,
        )
        yield "MFVI", _log_probs(found.posterior.predict(case.data.held_out, n_samples=N_SAMPLES))


PARTS: dict[str, Callable[[Case], Iterator[Scored]]] = {
    "plain": plain,
    "mode": at_the_mode,
    "gp": gaussian_process,
    "refine-d": diagonally_refined,
    "refine": refined,
    "mean-field": mean_field,
}
