"""How the rows SᵀJ of the data are added up into a Curvature.

Curvature is a sum over data, so an accumulator only ever adds; batches, chunks and their order do not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch

from lapwing._types import Float, State, Tensor
from lapwing.curvature.factors import Fisher
from lapwing.curvature.output_layer import OutputTerms
from lapwing.curvature.shards import over_ranks
from lapwing.likelihoods import Likelihood
from lapwing.network.jacobian import Jacobian
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature


class Accumulator(ABC):
    """A running sum of rows' outer products, in one structure."""

    def see(self, part: Float[Tensor, "n t c m"]) -> None:  # noqa: B027 (most have nothing to note)
        """The columns S of the rows SᵀJ that are added next; most sums need not know them."""

    @abstractmethod
    def add(self, pieces: Iterable[Jacobian]) -> None:
        """Add the rows of some data, which come some columns at a time."""

    def add_output(self, terms: OutputTerms) -> None:
        """Add the likelihood terms of some data, when the output layer alone is inferred."""
        raise NotImplementedError(f"{type(self).__name__} adds rows only.")

    @abstractmethod
    def result(self) -> Curvature: ...

    def state(self) -> State:
        """All of the unfinished sum, to be written down between two batches."""
        raise NotImplementedError(f"{type(self).__name__} cannot be written down.")

    def restore(self, state: State) -> None:
        """Go on from there, to the same bits."""
        raise NotImplementedError(f"{type(self).__name__} cannot be written down.")


class Summation:
    """How rows are added up in a pass."""

    adds_output: bool = False  # whether an output layer inferred alone is added without rows
    by_column: bool = False  # whether rows are added as fast one column of S at a time, in less memory
    whole_data: bool = False  # whether all rows of a datum must come at once

    def roots(self, fisher: Fisher, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """The columns S of each part of the curvature: (n, t, c, m)."""
        return fisher.parts(likelihood, f, y)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        raise NotImplementedError(f"{type(self).__name__} is not a sum over rows.")

    def accumulators(self, n_parts: int, layout: ParamLayout, device: torch.device) -> list[Accumulator]:
        """One for each part of the curvature."""
        return [self.accumulator(layout, device) for _ in range(n_parts)]

    def second_pass(self, parts: Sequence[Curvature]) -> Sequence[Accumulator] | None:
        """Accumulators for another pass over the data, given what the first one found; most need none."""
        return None

    def together(self, parts: Sequence[Curvature]) -> Sequence[Curvature]:
        """The parts of all data; those of this process are given, none when it has no data."""
        return over_ranks(parts)
