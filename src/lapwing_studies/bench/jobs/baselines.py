"""Baselines: the plain network, temperature scaling, a deep ensemble of five, and Monte Carlo dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import process_time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lapwing_studies.bench.jobs.clock import OutOfTime, cpu_limit
from lapwing_studies.bench.jobs.kinds import mixture_nll
from lapwing_studies.bench.jobs.records import Method
from lapwing_studies.bench.jobs.rows import Cut, Rows, called
from lapwing_studies.bench.jobs.training import Trained, train

if TYPE_CHECKING:
    from lapwing_studies.bench.jobs.workloads import Job

N_NETWORKS = 5
N_PASSES = 30
DROPOUT = 0.1


@dataclass(frozen=True, eq=False)
class Rivals:
    """The baselines, each limited to `limit` CPU seconds. Their noise or temperature is chosen on the same held-out
    rows as Lapwing's; the plain network uses none."""

    job: Job
    cut: Cut
    trained: Trained
    limit: float

    def __iter__(self) -> Iterator[Method]:
        yield self._limited("MAP", self.alone)
        yield self._limited("temperature", self.rescaled)
        if self.job.ensemble:
            yield self._limited(f"ensemble of {N_NETWORKS}", self.ensemble)
        else:
            yield Method(method=f"ensemble of {N_NETWORKS}", nll=None, seconds=None, note="skipped: training is dear")
        if self.job.has_dropout or self.job.dropout_variant:
            yield self._limited("MC dropout", self.dropout)
        else:
            yield Method(method="MC dropout", nll=None, seconds=None, note="skipped: the network is not trained")

    def alone(self) -> tuple[float, str]:
        scale = self.job.kind.trained_scale(outputs(self.trained.model, self.cut.train), self.cut.train.y)
        return self._nll([(self._test(self.trained.model), scale)]), ""

    def rescaled(self) -> tuple[float, str]:
        scale = self._held_out_scale(self.trained.model)
        return self._nll([(self._test(self.trained.model), scale)]), f"{scale:.3g} by held-out rows"

    def ensemble(self) -> tuple[float, str]:
        """The network and four more with other seeds; the mean of their densities."""
        models = [self.trained.model]
        models += [self._trained_anew(0.0, seed) for seed in range(1, N_NETWORKS)]
        members = [(self._test(model), self._member_scale(model)) for model in models]
        return self._nll(members), f"{N_NETWORKS - 1} more trainings"

    def dropout(self) -> tuple[float, str]:
        """Thirty passes with dropout on, of the network itself or of a variant trained with dropout."""
        own = self.job.has_dropout
        model = self.trained.model if own else self._trained_anew(DROPOUT, 0)
        with dropping(model), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            held_out = torch.stack([outputs(model, self.cut.held_out) for _ in range(N_PASSES)]).mean(0)
            passes = [self._test(model) for _ in range(N_PASSES)]
        scale = self.job.kind.trained_scale(held_out, self.cut.held_out.y)
        return self._nll([(f, scale) for f in passes]), f"{N_PASSES} passes" + (
            "" if own else f", a variant trained with {DROPOUT:g}"
        )

    def _member_scale(self, model: nn.Module) -> float:
        """Regression: the noise from the held-out rows. Classification: the network's own temperature, 1."""
        return self.job.kind.trained_scale(outputs(model, self.cut.held_out), self.cut.held_out.y)

    def _held_out_scale(self, model: nn.Module) -> float:
        return self.job.kind.best_scale(outputs(model, self.cut.held_out), self.cut.held_out.y)

    def _trained_anew(self, dropout: float, seed: int) -> nn.Module:
        job = self.job
        return train(lambda: job.network(dropout), self.cut.train, job.kind, job.recipe, seed=seed).model

    def _test(self, model: nn.Module) -> Tensor:
        return outputs(model, self.cut.test)

    def _nll(self, members: list[tuple[Tensor, float]]) -> float:
        return mixture_nll(self.job.kind, members, self.cut.test.y)

    def _limited(self, method: str, work: Callable[[], tuple[float, str]]) -> Method:
        start = process_time()
        try:
            with cpu_limit(self.limit):
                nll, note = work()
        except OutOfTime:
            return Method(method=method, nll=None, seconds=None, note=f"not finished after {self.limit:g} s")
        return Method(method=method, nll=nll, seconds=round(process_time() - start, 3), note=note)


def outputs(model: nn.Module, rows: Rows) -> Tensor:
    with torch.no_grad():
        return torch.cat([called(model, x) for x, _ in rows.batches(500)])


@contextmanager
def dropping(model: nn.Module) -> Iterator[None]:
    """Dropout in training mode, all other modules in evaluation mode; evaluation mode again afterwards."""
    for layer in _drops(model):
        layer.train()
    try:
        yield
    finally:
        model.eval()


def _drops(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Dropout, nn.Dropout1d, nn.Dropout2d)) and m.p > 0]
