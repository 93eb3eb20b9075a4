"""Estimate the curvature at θ*: passes over the data that sum curvature, gradient and fit statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from lapwing._types import Float, State, Tensor
from lapwing.curvature.accumulator import Accumulator, AccumulatorFactory
from lapwing.curvature.checkpointing import NO_CHECKPOINT, PassCheckpoint, checkpointed
from lapwing.curvature.factors import Fisher
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.passes import Pass, Source
from lapwing.curvature.shards import over_ranks
from lapwing.curvature.statistics import FitStatistics, RunningStatistics
from lapwing.curvature.structure import PassPlan, Structure
from lapwing.data.joining import Joiner
from lapwing.likelihoods import Likelihood, Sites
from lapwing.network.linearised import Linearised, Trace
from lapwing.network.products import DataJacobian
from lapwing.operators import Curvature, GroupedDiagonal
from lapwing.runtime import distributed


@dataclass(frozen=True, eq=False)
class Estimate:
    """H = Σ_g c_g H_g as its parts H_g at unit dispersion, and the fit statistics of the same data."""

    parts: tuple[Curvature, ...]
    statistics: FitStatistics
    prior_scale: float = 1.0  # prior rescaling when the curvature comes from a subset of the data
    in_expectation: bool = False  # whether Λ was averaged over the posterior of the outputs (lw.tune, classification)

    def joined(self, others: Sequence[Estimate]) -> Estimate:
        """The estimate of these data and the others' together: parts and statistics are sums over data, and add."""
        columns = zip(self.parts, *(other.parts for other in others), strict=True)
        parts = tuple(first.joined(rest) for first, *rest in columns)
        averaged = self.in_expectation or any(other.in_expectation for other in others)
        statistics = self.statistics.joined([other.statistics for other in others])
        return Estimate(parts, statistics, in_expectation=averaged)

    def without(self, less: Estimate) -> Estimate:
        """The estimate of these data without those of `less`, which must be among them."""
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
    checkpoint: PassCheckpoint = NO_CHECKPOINT,
) -> Estimate:
    """Sum the structure's curvature over (x, encoded y) batches. Rows in memory stay within `chunk_floats` numbers.

    `generator` and the prior P₀ (default: the identity) are used by structures that select data points. `checkpoint`
    stores unfinished sums between batches, and resumes from them. Under `torch.distributed` the sums are over the data
    of all ranks.
    """
    summed = structure.summed or structure
    rows_at_once = max(1, chunk_floats // summed.row_floats(linearised.sizes))
    P0 = GroupedDiagonal.identity(linearised.layout.p, linearised.network.device) if P0 is None else P0
    # A fixed seed by default: the same data points are selected in every fit.
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    sweep = Pass(linearised, likelihood, sites, fisher, rows_at_once, summed, generator, P0, outputs)
    work = structure.prepared(sweep, data)
    sums = PassState(sweep, work.factory)
    parts = run_passes(sums, work, checkpoint)
    statistics = sums.statistics.result()
    if structure.by_products:
        H = GaussNewton(DataJacobian.of(linearised, data), likelihood, sites, fisher, outputs)
        parts = structure.from_products(H, len(statistics.gradients), parts)
    return Estimate(tuple(parts), statistics, work.prior_scale)


class PassState:
    """Running sums of a pass: the fit statistics and, where a factory is given, the accumulator of each part."""

    def __init__(self, sweep: Pass, factory: AccumulatorFactory | None) -> None:
        self.sweep = sweep if factory is None else replace(sweep, factory=factory)
        self.factory = factory
        self.statistics = RunningStatistics(sweep.linearised, sweep.likelihood, sweep.sites)
        self.accumulators: Sequence[Accumulator] = ()

    def add(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        # The statistics go first: they tell how many parts there are, which the accumulators need.
        self.statistics.add(trace, f, y)
        if self.factory is not None:
            self.accumulators = self.accumulators or self._empty(self.factory, self.statistics.n_parts)
            self.sweep.add(self.accumulators, trace, f, y)

    def add_rows(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        """In a second pass: rows only, since the statistics are complete."""
        self.sweep.add(self.accumulators, trace, f, y)

    def state(self) -> State:
        sums = [accumulator.state() for accumulator in self.accumulators]
        return {"statistics": self.statistics.state(), "fisher": self.sweep.fisher.state(), "sums": sums}

    def restore(self, state: State) -> None:
        self.statistics.restore(state["statistics"])
        self.sweep.fisher.restore(state["fisher"])
        if self.factory is not None and not self.accumulators:
            # The first batch tells how many parts there are; when resuming, the state does.
            self.accumulators = self._empty(self.factory, len(state["sums"]))
        for accumulator, kept_ in zip(self.accumulators, state["sums"], strict=True):
            accumulator.restore(kept_)

    def _empty(self, factory: AccumulatorFactory, n: int) -> list[Accumulator]:
        linearised = self.sweep.linearised
        return factory.accumulators(n, linearised.layout, linearised.network.device)


def run_passes(sums: PassState, work: PassPlan, checkpoint: PassCheckpoint = NO_CHECKPOINT) -> Sequence[Curvature]:
    """Run one or two passes; the curvature of each part, empty where only the statistics are summed."""
    found = checkpoint.resumed()
    # Whether each rank's checkpoint is from after its first pass: ranks may have been stopped at different times.
    further = distributed.gathered(found is not None and found["parts"] is not None)
    if found is not None and found["parts"] is not None:
        # The checkpoint is from the second pass: the first one is complete.
        parts, left = list(found["parts"]), found
    else:
        _run_pass(sums, sums.add, work.data, checkpoint, found, None)
        parts, left = [accumulator.result() for accumulator in sums.accumulators], None
    # Parts in a checkpoint are already summed over all ranks: take those of one rank, do not sum again.
    sum_over_ranks = over_ranks if sums.factory is None else sums.factory.sum_over_ranks
    parts = distributed.broadcast(parts, further.index(True)) if any(further) else list(sum_over_ranks(parts))
    second = None if sums.factory is None else sums.factory.second_pass(parts)
    if second is None:
        return parts
    sums.accumulators = second
    _run_pass(sums, sums.add_rows, work.data, checkpoint, left, parts)
    return over_ranks([accumulator.result() for accumulator in second], before=parts)


def _run_pass(
    sums: PassState,
    add: Callable[[Trace, Tensor, Tensor], None],
    data: Source,
    checkpoint: PassCheckpoint,
    found: State | None,
    parts: list[Curvature] | None,
) -> None:
    """Add all batches, or those after the checkpoint `found`; `parts` is the result of the pass before this one."""
    done, joiner = 0, Joiner(sums.sweep.joined_at_most)
    if found is not None:
        sums.restore(found)
        joiner.restore(found.get("waiting", {}))  # small batches that were joined but not yet processed
        done = found["done"]

    def state(k: int) -> State:
        return {"parts": parts, "done": k, "waiting": joiner.state(), **sums.state()}

    remaining = checkpointed(data(), done, checkpoint, state)
    with closing(sums.sweep.pieces(joiner.through(remaining), done)) as pieces:
        for trace, f, y in pieces:
            add(trace, f, y)
