"""Structures: which entries of the curvature are kept, and what that costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.passes import Pass, Source
from lapwing.curvature.summation import Summation
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature


@dataclass(frozen=True, eq=False)
class Work:
    """How which data are added up, and what the prior must be multiplied by to go with them."""

    summation: Summation | None  # None: nothing but the statistics
    data: Source
    prior_scale: float = 1.0


class Structure(Summation, ABC):
    """A choice of which entries of H are kept."""

    additive: bool = False  # whether the curvatures of two sets of data add up to that of both, exactly
    resumable: bool = False  # whether its unfinished sums can be written down
    by_products: bool = False  # whether it comes from products with H, pass by pass, not from a sum over rows
    most_rows: int = 1 << 60  # of outputs that are predicted at a time
    exact: bool = False  # whether nothing of H is lost
    all_data: bool = True  # whether the evidence is that of all data

    @property
    def described(self) -> str:
        """What posteriors of different structures are told apart by."""
        return type(self).__name__.lower()

    def prepared(self, sweep: Pass, data: Source) -> Work:
        """A look at the data before the pass, for structures that must know them; most need none."""
        return Work(self.summed, data)

    @property
    def summed(self) -> Structure | None:
        """The structure that the first pass sums over rows: this one, unless it comes from products alone."""
        return None if self.by_products else self

    def from_products(self, H: GaussNewton, n_parts: int, near: Sequence[Curvature]) -> Sequence[Curvature]:
        """The parts of the curvature, where they come from products; `near` is what the first pass summed."""
        raise NotImplementedError(f"{type(self).__name__} is a sum over rows.")

    def within(self, layout: ParamLayout, n_parts: int, floats: int) -> Structure:
        """The same with what it leaves to the memory decided: so many numbers are allowed."""
        return self

    @abstractmethod
    def stored_floats(self, layout: ParamLayout) -> int:
        """Numbers kept after the fit, at most."""

    def working_floats(self, layout: ParamLayout) -> int:
        """Numbers taken besides while products are worked on."""
        return 0

    @abstractmethod
    def row_floats(self, sizes: RowSizes) -> int:
        """Numbers one row SᵀJ takes while it is added or contracted."""

    def predicted_floats(self, sizes: RowSizes) -> int:
        """Numbers one row of J takes while outputs are predicted."""
        return self.row_floats(sizes)
