"""Accumulate the rows SᵀJ of the data into a Curvature.

Curvature is a sum over data: the result does not depend on batches, chunks or their order.
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
    """A running sum of outer products of rows SᵀJ, in one structure."""

    def observe(self, part: Float[Tensor, "n t c m"]) -> None:  # noqa: B027 (most have nothing to note)
        """Called with the columns S of the rows that are added next; most accumulators ignore it."""

    @abstractmethod
    def add(self, pieces: Iterable[Jacobian]) -> None:
        """Add the rows of some data; each piece holds some columns of S for all of them."""

    def add_output(self, terms: OutputTerms) -> None:
        """Add the likelihood terms of some data in closed form, if only the output layer is inferred."""
        raise NotImplementedError(f"{type(self).__name__} adds rows only.")

    @abstractmethod
    def result(self) -> Curvature: ...

    def state(self) -> State:
        """The unfinished sum, complete, for a checkpoint between two batches."""
        raise NotImplementedError(f"{type(self).__name__} cannot be written down.")

    def restore(self, state: State) -> None:
        """Continue from a saved state, to the same bits as an uninterrupted run."""
        raise NotImplementedError(f"{type(self).__name__} cannot be written down.")


class AccumulatorFactory:
    """Creates the accumulators of a pass, and says which rows they take."""

    adds_output: bool = False  # whether accumulators have `add_output`, for an output layer inferred alone
    by_column: bool = False  # whether one column of S at a time is as fast as several, and saves memory
    whole_data: bool = False  # whether all rows of a datum must come in one piece

    def roots(self, fisher: Fisher, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """The columns S (n, t, c, m) of each part of the curvature."""
        return fisher.parts(likelihood, f, y)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        raise NotImplementedError(f"{type(self).__name__} is not a sum over rows.")

    def accumulators(self, n_parts: int, layout: ParamLayout, device: torch.device) -> list[Accumulator]:
        """One accumulator for each part of the curvature."""
        return [self.accumulator(layout, device) for _ in range(n_parts)]

    def second_pass(self, parts: Sequence[Curvature]) -> Sequence[Accumulator] | None:
        """Accumulators for a second pass, given the result of the first; most structures need none."""
        return None

    def sum_over_ranks(self, parts: Sequence[Curvature]) -> Sequence[Curvature]:
        """The parts summed over ranks; `parts` are those of this rank, empty if it has no data."""
        return over_ranks(parts)
