"""A fit seen from its shapes, before any work: what the cost of a structure depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lapwing.curvature.survey import Survey, Tile
from lapwing.network.parameters import ParamLayout


@dataclass(frozen=True, eq=False)
class Workload:
    """The parameters, the data, and the columns of SᵀJ that are made of each datum.

    The defaults do for bytes that are stored; multiplications need the columns and the forward pass.
    """

    survey: Survey
    n_parts: int = 1  # of the curvature: one, or one per noise level
    n_data: int | None = None  # as announced; None when the data do not say
    budget: int = 1 << 62  # bytes
    columns: int = 1  # of SᵀJ per datum, of all parts
    forward_macs: int = 1  # multiplications of one forward pass of the whole network, per datum
    through_body: bool = True  # whether columns go through the whole network, not the output layer alone

    @property
    def layout(self) -> ParamLayout:
        return self.survey.layout

    @property
    def p(self) -> int:
        return self.survey.layout.p

    @property
    def k(self) -> int:
        """Outputs of a datum."""
        return self.survey.linearised.k

    @property
    def tiles(self) -> Sequence[Tile]:
        return self.survey.tiles

    @property
    def closed_output(self) -> bool:
        """Whether the output layer alone is inferred, so that its curvature needs no columns."""
        return self.survey.linearised.only_last

    @property
    def n_rows(self) -> int | None:
        """Rows SᵀJ of all data, where they are fewer than the parameters; None where they are not, or nobody knows."""
        rows = None if self.n_data is None else self.n_data * self.columns
        return rows if rows is not None and rows < self.p else None

    @property
    def statistics_macs(self) -> int:
        """Per datum: the forward pass and the gradient of the log likelihood."""
        gradient = 2 * self.forward_macs if self.through_body else sum(tile.macs for tile in self.tiles)
        return self.forward_macs + gradient

    @property
    def pass_macs(self) -> int:
        """Per datum: those, and the backward passes of the columns."""
        return self.statistics_macs + (self.columns * self.forward_macs if self.through_body else 0)

    @property
    def dense_row_macs(self) -> int:
        """Of writing out the rows of a datum."""
        return self.columns * sum(tile.macs for tile in self.tiles)

    @property
    def factor_macs(self) -> int:
        """Of all Kronecker factors."""
        return sum(tile.factor_macs(self.columns) for tile in self.tiles)
