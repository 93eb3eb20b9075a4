"""One pass over the data: curvature, gradient and fit statistics of the likelihood at θ*."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.accumulate import Structure
from lapwing.curvature.factors import Fisher
from lapwing.data import ModelInput
from lapwing.errors import located
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


def estimate(
    linearised: Linearised,
    likelihood: Likelihood,
    data: Iterable[tuple[ModelInput, Tensor]],
    *,
    sites: Sites,
    structure: Structure,
    fisher: Fisher,
    chunk_floats: int,
) -> Estimate:
    """Sum the structure's curvature over (x, encoded y) batches; rows in memory stay within `chunk_floats` numbers."""
    accumulators = None
    statistics: FitStatistics | None = None
    row_floats = structure.row_floats(linearised.layout, linearised.row_floats)
    rows_at_once = max(1, chunk_floats // row_floats)
    for number, (batch, targets) in enumerate(data):
        for x, y in _pieces(batch, targets, max(1, rows_at_once // linearised.k)):
            with located(f"batch {number}"), linearised.trace(x) as trace:
                f = sites.split(trace.outputs)
                seen = _statistics(trace, likelihood, sites, f, y)
                parts = fisher.parts(likelihood, f, y)
                if accumulators is None:
                    accumulators = [structure.accumulator(linearised.layout, f.device) for _ in parts]
                for accumulator, part in zip(accumulators, parts, strict=True):
                    columns = _columns(part, sites, fisher)
                    for group in columns.split(rows_at_once, dim=-1):
                        accumulator.add(trace.rows(group))
            statistics = seen if statistics is None else statistics + seen
    assert accumulators is not None and statistics is not None  # Batches refuses to be empty
    return Estimate(tuple(accumulator.result() for accumulator in accumulators), statistics)


def _pieces(x: ModelInput, y: Tensor, rows: int) -> Iterator[tuple[ModelInput, Tensor]]:
    if x.n <= rows:
        yield x, y
        return
    for start in range(0, x.n, rows):
        yield x.rows(slice(start, start + rows)), y[start : start + rows]


def _statistics(trace: Trace, likelihood: Likelihood, sites: Sites, f: Tensor, y: Tensor) -> FitStatistics:
    residuals = likelihood.part_residuals(f, y)
    gradients = torch.stack([trace.vjp(sites.join(r).reshape(len(f), -1)) for r in residuals])
    return FitStatistics(len(f), likelihood.statistics(f.double(), y), gradients)


def _columns(part: Float[Tensor, "n t c m"], sites: Sites, fisher: Fisher) -> Float[Tensor, "n k j"]:
    """Site-shaped columns as cotangents of the flat outputs: one per site and column, or one per column."""
    n, t, c, m = part.shape
    if t > 1 and fisher.separate_sites:
        spread = torch.einsum("ntcm,ts->ntcsm", part, torch.eye(t, dtype=part.dtype, device=part.device))
        part = spread.reshape(n, t, c, t * m)
    columns = [sites.join(column).reshape(n, -1) for column in part.unbind(-1)]
    return torch.stack(columns, dim=-1)
