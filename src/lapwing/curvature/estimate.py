"""One pass over the data: curvature, gradient and fit statistics of the likelihood at θ*."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.accumulate import Accumulator, LayerProducts, Structure, Summation, Work
from lapwing.curvature.factors import Fisher
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.output_layer import OutputTerms
from lapwing.curvature.points import Source
from lapwing.data import ModelInput
from lapwing.errors import InputError, located
from lapwing.jacobian import FactorBlock, Jacobian
from lapwing.likelihoods import Likelihood, Sites
from lapwing.linearise import Linearised, Trace
from lapwing.operators import Curvature, GroupedDiagonal
from lapwing.params import ParamLayout
from lapwing.products import DataJacobian


@dataclass(frozen=True, eq=False)
class FitStatistics:
    """What the evidence needs to know of the data besides the curvature; all sums over data, at unit dispersion."""

    n: int
    likelihood: Float[Tensor, " d"]  # → Likelihood.log_lik
    gradients: Float[Tensor, "g p"]  # Σ_n J_nᵀ r_n, one row per dispersion part

    def joined(self, others: Sequence[FitStatistics]) -> FitStatistics:
        total = self
        for more in others:
            likelihood, gradients = total.likelihood + more.likelihood, total.gradients + more.gradients
            total = FitStatistics(total.n + more.n, likelihood, gradients)
        return total

    def without(self, less: FitStatistics) -> FitStatistics:
        if less.n >= self.n:
            raise InputError(f"{less.n} data were to be taken out of {self.n}; nothing would be left.")
        return FitStatistics(self.n - less.n, self.likelihood - less.likelihood, self.gradients - less.gradients)


@dataclass(frozen=True, eq=False)
class Estimate:
    """H = Σ_g c_g H_g as its parts H_g, and the statistics of the same data."""

    parts: tuple[Curvature, ...]
    statistics: FitStatistics
    prior_scale: float = 1.0  # what the prior is multiplied by where some data stand for all

    def joined(self, others: Sequence[Estimate]) -> Estimate:
        """Of these data and the others' together: every sum over data adds, in this order."""
        columns = zip(self.parts, *(other.parts for other in others), strict=True)
        parts = tuple(first.joined(rest) for first, *rest in columns)
        return Estimate(parts, self.statistics.joined([other.statistics for other in others]))

    def without(self, less: Estimate) -> Estimate:
        """Of these data less some of them."""
        statistics = self.statistics.without(less.statistics)
        parts = tuple(H.without(gone) for H, gone in zip(self.parts, less.parts, strict=True))
        return Estimate(parts, statistics)


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over the data: what is differentiated, how rows are made, and how many may be in memory."""

    linearised: Linearised
    likelihood: Likelihood
    sites: Sites
    fisher: Fisher
    rows_at_once: int
    summation: Summation
    generator: torch.Generator
    P0: GroupedDiagonal
    outputs: Callable[[Trace], Tensor] = attrgetter("outputs")  # where the likelihood is looked at

    def pieces(self, data: Iterable[tuple[ModelInput, Tensor]]) -> Generator[tuple[Trace, Tensor, Tensor], None, None]:
        """(trace, f, y) for successive pieces of the batches; each trace is open until the next is asked for."""
        # Tensors without a rule give all their rows in one sweep; layers with one give them column by column.
        at_once = self.linearised.rest.names or self.summation.whole_data
        n = max(1, self.rows_at_once // (self.linearised.k if at_once else 1))
        for number, (batch, targets) in enumerate(data):
            step = in_equal_parts(batch.n, n)
            for start in range(0, batch.n, step):
                some = slice(start, start + step)
                x, y = (batch, targets) if step >= batch.n else (batch.rows(some), targets[some])
                with located(f"batch {number}"), self.linearised.trace(x) as trace:
                    yield trace, self.sites.split(self.outputs(trace)), y

    def add(self, accumulators: Sequence[Accumulator], trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        """Add one piece to the accumulators of the parts: by its likelihood terms if it can be, else row by row."""
        terms = self.output_terms(trace, f, y) if self.summation.adds_output else None
        if terms is not None:
            for accumulator, some in zip(accumulators, terms, strict=True):
                accumulator.add_output(some)
            return
        parts = self.summation.roots(self.fisher, self.likelihood, f, y)
        for accumulator, part in zip(accumulators, parts, strict=True):
            accumulator.see(part)
            accumulator.add(self.rows(trace, part))

    def output_terms(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> list[OutputTerms] | None:
        """The piece as terms of each part, when only the output layer is inferred and its positions are the terms."""
        if not self.linearised.only_last or self.linearised.layout.selection is not None:
            return None
        order = self.sites.split(torch.arange(self.linearised.k, device=f.device)[None])[0]
        block = trace.output_block(order)
        if block is None:
            return None
        curvatures = self.fisher.curvatures(self.likelihood, f, y)
        return None if curvatures is None else [OutputTerms(block, part) for part in curvatures]

    def columns_at_once(self, n: int) -> int:
        # One forward pass serves all rows of tensors without a rule: there it is as many as there is room for.
        if self.summation.whole_data:
            return 1 << 60
        alone = self.summation.by_column and not self.linearised.rest.names
        return 1 if alone else max(1, self.rows_at_once // n)

    def rows(self, trace: Trace, part: Float[Tensor, "n t c m"]) -> Iterator[Jacobian]:
        """SᵀJ for one part of the curvature, some columns at a time."""
        columns = _columns(part, self.sites, self.fisher)
        for group in columns.split(self.columns_at_once(trace.x.n), dim=-1):
            yield trace.rows(group)


def in_equal_parts(n: int, at_most: int) -> int:
    """The size of parts into which n data are cut, when a part may have so many: no small one is left over."""
    return -(-n // -(-n // at_most))


def estimate(
    linearised: Linearised,
    likelihood: Likelihood,
    data: Source,
    *,
    sites: Sites,
    structure: Structure,
    fisher: Fisher,
    chunk_floats: int,
    generator: torch.Generator | None = None,
    P0: GroupedDiagonal | None = None,
    outputs: Callable[[Trace], Tensor] = attrgetter("outputs"),
) -> Estimate:
    """Sum the structure's curvature over (x, encoded y) batches; rows in memory stay within `chunk_floats` numbers.

    `generator` and the prior P₀ (one precision, if none) matter to structures that choose among the data.
    """
    summed = structure.summed or structure
    rows_at_once = max(1, chunk_floats // summed.row_floats(linearised.sizes))
    P0 = GroupedDiagonal.identity(linearised.layout.p, linearised.network.device) if P0 is None else P0
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    sweep = Pass(linearised, likelihood, sites, fisher, rows_at_once, summed, generator, P0, outputs)
    work = structure.prepared(sweep, data)
    statistics = RunningStatistics(sweep)
    parts = summed_parts(sweep, work, statistics)
    if structure.by_products:
        H = GaussNewton(DataJacobian.of(linearised, data), likelihood, sites, fisher, outputs)
        parts = structure.from_products(H, len(statistics.gradients), parts)
    return Estimate(tuple(parts), statistics.result(), work.prior_scale)


def summed_parts(sweep: Pass, work: Work, statistics: RunningStatistics) -> Sequence[Curvature]:
    """The curvature of each part, summed over rows; none where nothing is summed but the statistics."""
    summation, accumulators = work.summation, list[Accumulator]()
    sweep = sweep if summation is None else replace(sweep, summation=summation)
    with closing(sweep.pieces(work.data())) as pieces:
        for trace, f, y in pieces:
            statistics.add(trace, f, y)
            if summation is not None:
                if not accumulators:
                    n_parts = len(statistics.gradients)
                    accumulators = summation.accumulators(n_parts, sweep.linearised.layout, f.device)
                sweep.add(accumulators, trace, f, y)
    parts = [accumulator.result() for accumulator in accumulators]
    second = None if summation is None else summation.second_pass(parts)
    if second is None:
        return parts
    with closing(sweep.pieces(work.data())) as pieces:
        for trace, f, y in pieces:
            sweep.add(second, trace, f, y)
    return [accumulator.result() for accumulator in second]


class RunningStatistics:
    """FitStatistics while they are being added up."""

    def __init__(self, sweep: Pass) -> None:
        self.sweep, self.n = sweep, 0
        self.likelihood: Tensor | float = 0.0
        self.gradients: list[_GradientSum] = []  # one per dispersion part

    def add(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        likelihood, sites = self.sweep.likelihood, self.sweep.sites
        residuals = [sites.join(r).reshape(len(f), -1) for r in likelihood.part_residuals(f, y)]
        if not self.gradients:
            self.gradients = [_GradientSum(self.sweep.linearised.layout, f.device) for _ in residuals]
        for total, r in zip(self.gradients, residuals, strict=True):
            total.add(*trace.vjp(r))
        self.likelihood = self.likelihood + likelihood.statistics(f.double(), y)
        self.n += len(f)

    def result(self) -> FitStatistics:
        assert isinstance(self.likelihood, Tensor)  # Batches refuses to be empty
        gradients = [total.result() for total in self.gradients]
        together = gradients[0][None] if len(gradients) == 1 else torch.stack(gradients)
        return FitStatistics(self.n, self.likelihood, together)


class _GradientSum:
    """A running Σ_n J_nᵀ r_n, float64: Σ g aᵀ of dense layers over many data at a time, other tensors as they come."""

    def __init__(self, layout: ParamLayout, device: torch.device) -> None:
        self.layout, self.whole = layout, layout.whole
        self.total = torch.zeros(self.whole.p, dtype=torch.float64, device=device)
        self.layers = LayerProducts(self.total)

    def add(self, blocks: Sequence[FactorBlock], gradients: Mapping[str, Tensor]) -> None:
        for name, g in gradients.items():
            self.total[self.whole[name]].add_(g.reshape(-1))
        for block in blocks:
            self.layers.add(block.arrangement, block.g[:, 0].flatten(0, 1), block.a.flatten(0, 1))

    def result(self) -> Float[Tensor, " p"]:
        self.layers.finish()
        selection = self.layout.selection
        return self.total if selection is None else self.total[selection.to(self.total.device)]


def _columns(part: Float[Tensor, "n t c m"], sites: Sites, fisher: Fisher) -> Float[Tensor, "n k j"]:
    """Site-shaped columns as cotangents of the flat outputs: one per site and column, or one per column."""
    n, t, c, m = part.shape
    if t > 1 and fisher.separate_sites:
        spread = torch.einsum("ntcm,ts->ntcsm", part, torch.eye(t, dtype=part.dtype, device=part.device))
        part = spread.reshape(n, t, c, t * m)
    columns = [sites.join(column).reshape(n, -1) for column in part.unbind(-1)]
    return torch.stack(columns, dim=-1)
