"""One pass over the data: curvature, gradient and fit statistics of the likelihood at θ*."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from lapwing._types import Float, State, Tensor
from lapwing.curvature.factors import Fisher
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.keeper import NOT_KEPT, Keeper, kept
from lapwing.curvature.passes import Pass, Source
from lapwing.curvature.shards import over_ranks
from lapwing.curvature.statistics import FitStatistics, RunningStatistics
from lapwing.curvature.structure import Structure, Work
from lapwing.curvature.summation import Accumulator, Summation
from lapwing.data.joining import Joiner
from lapwing.likelihoods import Likelihood, Sites
from lapwing.network.linearised import Linearised, Trace
from lapwing.network.products import DataJacobian
from lapwing.operators import Curvature, GroupedDiagonal
from lapwing.runtime import distributed


@dataclass(frozen=True, eq=False)
class Estimate:
    """H = Σ_g c_g H_g as its parts H_g, and the statistics of the same data."""

    parts: tuple[Curvature, ...]
    statistics: FitStatistics
    prior_scale: float = 1.0  # what the prior is multiplied by where some data stand for all
    in_expectation: bool = False  # whether Λ was averaged over a posterior's outputs: lw.tune does so for classes

    def joined(self, others: Sequence[Estimate]) -> Estimate:
        """Of these data and the others' together: every sum over data adds, in this order."""
        columns = zip(self.parts, *(other.parts for other in others), strict=True)
        parts = tuple(first.joined(rest) for first, *rest in columns)
        averaged = self.in_expectation or any(other.in_expectation for other in others)
        statistics = self.statistics.joined([other.statistics for other in others])
        return Estimate(parts, statistics, in_expectation=averaged)

    def without(self, less: Estimate) -> Estimate:
        """Of these data less some of them."""
        statistics = self.statistics.without(less.statistics)
        parts = tuple(H.without(gone) for H, gone in zip(self.parts, less.parts, strict=True))
        return Estimate(parts, statistics)


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
    keeper: Keeper = NOT_KEPT,
) -> Estimate:
    """Sum the structure's curvature over (x, encoded y) batches; rows in memory stay within `chunk_floats` numbers.

    `generator` and the prior P₀ (one precision, if none) matter to structures that choose among the data. `keeper`
    writes the unfinished sums down between batches, and takes them up again. Where the data are spread over ranks, the
    sums are those of all of them.
    """
    summed = structure.summed or structure
    rows_at_once = max(1, chunk_floats // summed.row_floats(linearised.sizes))
    P0 = GroupedDiagonal.identity(linearised.layout.p, linearised.network.device) if P0 is None else P0
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    sweep = Pass(linearised, likelihood, sites, fisher, rows_at_once, summed, generator, P0, outputs)
    work = structure.prepared(sweep, data)
    sums = Sums(sweep, work.summation)
    parts = summed_parts(sums, work, keeper)
    statistics = sums.statistics.result()
    if structure.by_products:
        H = GaussNewton(DataJacobian.of(linearised, data), likelihood, sites, fisher, outputs)
        parts = structure.from_products(H, len(statistics.gradients), parts)
    return Estimate(tuple(parts), statistics, work.prior_scale)


class Sums:
    """Everything that a pass adds up, some data at a time: the statistics, and rows where there is a summation."""

    def __init__(self, sweep: Pass, summation: Summation | None) -> None:
        self.sweep = sweep if summation is None else replace(sweep, summation=summation)
        self.summation = summation
        self.statistics = RunningStatistics(sweep.linearised, sweep.likelihood, sweep.sites)
        self.accumulators: Sequence[Accumulator] = ()

    def add(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        self.statistics.add(trace, f, y)
        if self.summation is not None:
            self.accumulators = self.accumulators or self._empty(self.summation, self.statistics.n_parts)
            self.sweep.add(self.accumulators, trace, f, y)

    def add_again(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        """In a second pass: rows only."""
        self.sweep.add(self.accumulators, trace, f, y)

    def state(self) -> State:
        sums = [accumulator.state() for accumulator in self.accumulators]
        return {"statistics": self.statistics.state(), "fisher": self.sweep.fisher.state(), "sums": sums}

    def restore(self, state: State) -> None:
        self.statistics.restore(state["statistics"])
        self.sweep.fisher.restore(state["fisher"])
        if self.summation is not None and not self.accumulators:
            self.accumulators = self._empty(self.summation, len(state["sums"]))
        for accumulator, kept_ in zip(self.accumulators, state["sums"], strict=True):
            accumulator.restore(kept_)

    def _empty(self, summation: Summation, n: int) -> list[Accumulator]:
        linearised = self.sweep.linearised
        return summation.accumulators(n, linearised.layout, linearised.network.device)


def summed_parts(sums: Sums, work: Work, keeper: Keeper = NOT_KEPT) -> Sequence[Curvature]:
    """The curvature of each part, summed over rows; none where nothing is summed but the statistics."""
    found = keeper.resumed()
    further = distributed.gathered(found is not None and found["parts"] is not None)  # whose first pass is over
    if found is not None and found["parts"] is not None:
        parts, left = list(found["parts"]), found
    else:
        _pass(sums, sums.add, work.data, keeper, found, None)
        parts, left = [accumulator.result() for accumulator in sums.accumulators], None
    # Parts that were written down are those of all ranks already.
    together = over_ranks if sums.summation is None else sums.summation.together
    parts = distributed.broadcast(parts, further.index(True)) if any(further) else list(together(parts))
    second = None if sums.summation is None else sums.summation.second_pass(parts)
    if second is None:
        return parts
    sums.accumulators = second
    _pass(sums, sums.add_again, work.data, keeper, left, parts)
    return over_ranks([accumulator.result() for accumulator in second], before=parts)


def _pass(
    sums: Sums,
    add: Callable[[Trace, Tensor, Tensor], None],
    data: Source,
    keeper: Keeper,
    found: State | None,
    parts: list[Curvature] | None,
) -> None:
    """Add all data, or those that an earlier run has left over; `parts` are what a pass before this one has found."""
    done, joiner = 0, Joiner(sums.sweep.joined_at_most)
    if found is not None:
        sums.restore(found)
        joiner.restore(found.get("waiting", {}))
        done = found["done"]

    def state(k: int) -> State:
        return {"parts": parts, "done": k, "waiting": joiner.state(), **sums.state()}

    left = kept(data(), done, keeper, state)
    with closing(sums.sweep.pieces(joiner.through(left), done)) as pieces:
        for trace, f, y in pieces:
            add(trace, f, y)
