"""The shapes and counts that the cost of a structure depends on, known before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lapwing.curvature.model_summary import ModelSummary, ParameterBlock
from lapwing.network.parameters import ParamLayout


@dataclass(frozen=True, eq=False)
class Workload:
    """A planned fit: the parameters, the number of data, and the columns of SᵀJ per datum.

    The defaults are enough to count stored bytes; counting multiplications needs the columns and the forward pass.
    """

    summary: ModelSummary
    n_parts: int = 1  # of the curvature: one, or one per noise level
    n_data: int | None = None  # None when the loader has no length
    budget: int = 1 << 62  # bytes
    columns: int = 1  # of S per datum, summed over parts
    forward_macs: int = 1  # multiplications of a forward pass per datum
    through_body: bool = True  # False if only the output layer is differentiated

    @property
    def layout(self) -> ParamLayout:
        return self.summary.layout

    @property
    def p(self) -> int:
        return self.summary.layout.p

    @property
    def k(self) -> int:
        """Number of outputs per datum."""
        return self.summary.linearised.k

    @property
    def blocks(self) -> Sequence[ParameterBlock]:
        return self.summary.blocks

    @property
    def closed_output(self) -> bool:
        """Whether only the output layer is inferred, so that its curvature has a closed form."""
        return self.summary.linearised.only_last

    @property
    def n_rows(self) -> int | None:
        """Rows SᵀJ of all data if they are fewer than the parameters; else None, also when the number of data is
        unknown."""
        rows = None if self.n_data is None else self.n_data * self.columns
        return rows if rows is not None and rows < self.p else None

    @property
    def statistics_macs(self) -> int:
        """Per datum: the forward pass and the gradient of the log likelihood."""
        gradient = 2 * self.forward_macs if self.through_body else sum(block.macs for block in self.blocks)
        return self.forward_macs + gradient

    @property
    def pass_macs(self) -> int:
        """Per datum: the statistics, and the backward passes of all columns."""
        return self.statistics_macs + (self.columns * self.forward_macs if self.through_body else 0)

    @property
    def dense_row_macs(self) -> int:
        """Per datum: computing its rows in dense form."""
        return self.columns * sum(block.macs for block in self.blocks)

    @property
    def factor_macs(self) -> int:
        """Per datum: accumulating all Kronecker factors."""
        return sum(block.factor_macs(self.columns) for block in self.blocks)
