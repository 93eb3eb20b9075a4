"""One pass over the data: curvature, gradient and fit statistics of the likelihood at θ*."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.accumulate import Accumulator, Structure
from lapwing.curvature.factors import Fisher
from lapwing.data import ModelInput
from lapwing.errors import located
from lapwing.jacobian import Jacobian
from lapwing.likelihoods import Likelihood, Sites
from lapwing.linearise import Linearised, Trace
from lapwing.operators import Curvature


@dataclass(frozen=True, eq=False)
class FitStatistics:
    """What the evidence needs to know of the data besides the curvature; all sums over data, at unit dispersion."""

    n: int
    likelihood: Float[Tensor, " d"]  # → Likelihood.log_lik
    gradients: Float[Tensor, "g p"]  # Σ_n J_nᵀ r_n, one row per dispersion part

    def __add__(self, other: FitStatistics) -> FitStatistics:
        return FitStatistics(self.n + other.n, self.likelihood + other.likelihood, self.gradients + other.gradients)


@dataclass(frozen=True, eq=False)
class Estimate:
    """H = Σ_g c_g H_g as its parts H_g, and the statistics of the same data."""

    parts: tuple[Curvature, ...]
    statistics: FitStatistics

    def __add__(self, other: Estimate) -> Estimate:
        both = torch.ones(2, dtype=torch.float64)
        parts = tuple(a.mixed([b], both) for a, b in zip(self.parts, other.parts, strict=True))
        return Estimate(parts, self.statistics + other.statistics)


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over the data: what is differentiated, how rows are made, and how many may be in memory."""

    linearised: Linearised
    likelihood: Likelihood
    sites: Sites
    fisher: Fisher
    rows_at_once: int
    outputs: Callable[[Trace], Tensor] = attrgetter("outputs")  # where the likelihood is looked at

    def pieces(self, data: Iterable[tuple[ModelInput, Tensor]]) -> Generator[tuple[Trace, Tensor, Tensor], None, None]:
        """(trace, f, y) for successive pieces of the batches; each trace is open until the next is asked for."""
        # Tensors without a rule give all their rows in one sweep; layers with one give them column by column.
        n = max(1, self.rows_at_once // (self.linearised.k if self.linearised.rest.names else 1))
        for number, (batch, targets) in enumerate(data):
            for start in range(0, batch.n, n):
                whole = n >= batch.n
                x, y = (batch, targets) if whole else (batch.rows(slice(start, start + n)), targets[start : start + n])
                with located(f"batch {number}"), self.linearised.trace(x) as trace:
                    yield trace, self.sites.split(self.outputs(trace)), y

    def rows(self, trace: Trace, part: Float[Tensor, "n t c m"]) -> Iterator[Jacobian]:
        """SᵀJ for one part of the curvature, some columns at a time."""
        columns = _columns(part, self.sites, self.fisher)
        for group in columns.split(max(1, self.rows_at_once // trace.x.n), dim=-1):
            yield trace.rows(group)


def estimate(
    linearised: Linearised,
    likelihood: Likelihood,
    data: Callable[[], Iterable[tuple[ModelInput, Tensor]]],
    *,
    sites: Sites,
    structure: Structure,
    fisher: Fisher,
    chunk_floats: int,
    outputs: Callable[[Trace], Tensor] = attrgetter("outputs"),
) -> Estimate:
    """Sum the structure's curvature over (x, encoded y) batches; rows in memory stay within `chunk_floats` numbers."""
    rows_at_once = max(1, chunk_floats // structure.row_floats(linearised.sizes))
    sweep = Pass(linearised, likelihood, sites, fisher, rows_at_once, outputs)
    accumulators: list[Accumulator] = []
    statistics = _RunningStatistics(sweep)
    with closing(sweep.pieces(data())) as pieces:
        for trace, f, y in pieces:
            statistics.add(trace, f, y)
            _accumulate(sweep, structure, trace, f, y, accumulators)
    parts = [accumulator.result() for accumulator in accumulators]
    second = structure.second_pass(parts)
    if second is not None:
        with closing(sweep.pieces(data())) as pieces:
            for trace, f, y in pieces:
                for accumulator, part in zip(second, fisher.parts(likelihood, f, y), strict=True):
                    accumulator.add(sweep.rows(trace, part))
        parts = [accumulator.result() for accumulator in second]
    return Estimate(tuple(parts), statistics.result())


def _accumulate(
    sweep: Pass, structure: Structure, trace: Trace, f: Tensor, y: Tensor, accumulators: list[Accumulator]
) -> None:
    parts = sweep.fisher.parts(sweep.likelihood, f, y)
    if not accumulators:
        accumulators += [structure.accumulator(sweep.linearised.layout, f.device) for _ in parts]
    for accumulator, part in zip(accumulators, parts, strict=True):
        accumulator.add(sweep.rows(trace, part))


_PENDING_PIECES = 16


class _RunningStatistics:
    """FitStatistics while they are being added up: float64 sums, updated in place."""

    def __init__(self, sweep: Pass) -> None:
        self.sweep, self.n = sweep, 0
        self.likelihood: Tensor | float = 0.0
        self.gradients: list[Tensor] = []
        self.pending: list[Tensor] = []  # some pieces' gradients, in the model's precision
        self.n_pending = 0

    def add(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        likelihood, sites = self.sweep.likelihood, self.sweep.sites
        residuals = [sites.join(r).reshape(len(f), -1) for r in likelihood.part_residuals(f, y)]
        if not self.gradients:
            p = self.sweep.linearised.layout.p
            self.gradients = [torch.zeros(p, dtype=torch.float64, device=f.device) for _ in residuals]
            self.pending = [torch.zeros(p, dtype=f.dtype, device=f.device) for _ in residuals]
        for total, r in zip(self.pending, residuals, strict=True):
            trace.add_vjp_(total, r)
        self.n_pending += 1
        if self.n_pending >= _PENDING_PIECES:
            self._fold()
        self.likelihood = self.likelihood + likelihood.statistics(f.double(), y)
        self.n += len(f)

    def result(self) -> FitStatistics:
        assert isinstance(self.likelihood, Tensor)  # Batches refuses to be empty
        self._fold()
        return FitStatistics(self.n, self.likelihood, torch.stack(self.gradients))

    def _fold(self) -> None:
        for total, some in zip(self.gradients, self.pending, strict=True):
            total.add_(some)
            some.zero_()
        self.n_pending = 0


def _columns(part: Float[Tensor, "n t c m"], sites: Sites, fisher: Fisher) -> Float[Tensor, "n k j"]:
    """Site-shaped columns as cotangents of the flat outputs: one per site and column, or one per column."""
    n, t, c, m = part.shape
    if t > 1 and fisher.separate_sites:
        spread = torch.einsum("ntcm,ts->ntcsm", part, torch.eye(t, dtype=part.dtype, device=part.device))
        part = spread.reshape(n, t, c, t * m)
    columns = [sites.join(column).reshape(n, -1) for column in part.unbind(-1)]
    return torch.stack(columns, dim=-1)
