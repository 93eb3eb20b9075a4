"""One pass over the data: what is differentiated, and how the rows SᵀJ are computed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature.accumulator import Accumulator, AccumulatorFactory
from lapwing.curvature.factors import Fisher
from lapwing.curvature.gauss_newton import cotangents
from lapwing.curvature.output_layer import OutputTerms
from lapwing.data import ModelInput
from lapwing.data.joining import opened
from lapwing.errors import located
from lapwing.likelihoods import Likelihood, Sites
from lapwing.network.jacobian import Jacobian
from lapwing.network.linearised import Linearised, Trace
from lapwing.operators import GroupedDiagonal

Source = Callable[[], Iterable[tuple[ModelInput, Tensor]]]


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass over the data: what is differentiated, how rows SᵀJ are computed, and how many may be in memory."""

    linearised: Linearised
    likelihood: Likelihood
    sites: Sites
    fisher: Fisher
    rows_at_once: int
    factory: AccumulatorFactory
    generator: torch.Generator
    P0: GroupedDiagonal
    outputs: Callable[[Trace], Tensor] = attrgetter("outputs")  # the f where Λ is evaluated

    def pieces(
        self, data: Iterable[tuple[ModelInput, Tensor]], done: int = 0
    ) -> Generator[tuple[Trace, Tensor, Tensor], None, None]:
        """(trace, f, y) for successive pieces of the batches. A trace is valid until the next piece is requested."""
        for number, (batch, targets) in enumerate(data, done):
            # A large batch of the user is cut, so that its rows fit into the budget.
            step = in_equal_parts(batch.n, self.data_at_once)
            for start in range(0, batch.n, step):
                some = slice(start, start + step)
                x, y = (batch, targets) if step >= batch.n else (batch.rows(some), targets[some])
                with located(batch.origin or f"batch {number}"):
                    for trace, of_these in opened(x, y, self.linearised.trace):
                        yield trace, self.sites.split(self.outputs(trace)), of_these

    @property
    def data_at_once(self) -> int:
        # Tensors without a layer rule need all columns in one backward pass; layers with a rule take them one by one.
        at_once = self.linearised.rest.names or self.factory.whole_data
        return max(1, self.rows_at_once // (self.linearised.k if at_once else 1))

    @property
    def joined_at_most(self) -> int:
        """Small batches are joined up to this many data."""
        return min(self.data_at_once, self.linearised.joined_batch_size)

    def add(self, accumulators: Sequence[Accumulator], trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> None:
        """Add one piece to the accumulators of the parts: in closed form for an output layer alone, else as rows."""
        terms = self.output_terms(trace, f, y) if self.factory.adds_output else None
        if terms is not None:
            for accumulator, some in zip(accumulators, terms, strict=True):
                accumulator.add_output(some)
            return
        parts = self.factory.roots(self.fisher, self.likelihood, f, y)
        for accumulator, part in zip(accumulators, parts, strict=True):
            accumulator.observe(part)
            accumulator.add(self.rows(trace, part))

    def output_terms(self, trace: Trace, f: Float[Tensor, "n t c"], y: Tensor) -> list[OutputTerms] | None:
        """The piece as likelihood terms of each part, if only the output layer is inferred; else None."""
        if not self.linearised.only_last or self.linearised.layout.selection is not None:
            return None
        # The order of the outputs by site and class, in which the layer's outputs are matched to likelihood terms.
        order = self.sites.split(torch.arange(self.linearised.k, device=f.device)[None])[0]
        block = trace.output_block(order)
        if block is None:
            return None
        curvatures = self.fisher.curvatures(self.likelihood, f, y)
        return None if curvatures is None else [OutputTerms(block, part) for part in curvatures]

    def columns_at_once(self, n: int) -> int:
        # Tensors without a layer rule: one forward pass serves all columns of a group, so groups are as large as memory
        # allows.
        if self.factory.whole_data:
            return 1 << 60
        alone = self.factory.by_column and not self.linearised.rest.names
        return 1 if alone else max(1, self.rows_at_once // n)

    def rows(self, trace: Trace, part: Float[Tensor, "n t c m"]) -> Iterator[Jacobian]:
        """SᵀJ for one part of the curvature, in groups of columns."""
        columns = cotangents(part, self.sites, self.fisher)
        for group in columns.split(self.columns_at_once(trace.x.n), dim=-1):
            yield trace.rows(group)


def in_equal_parts(n: int, at_most: int) -> int:
    """The step that cuts n data into equal parts of at most `at_most`, so that no small remainder is left."""
    return -(-n // -(-n // at_most))
