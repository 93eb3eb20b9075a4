"""Every entry of the curvature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lapwing._types import State, Tensor
from lapwing.curvature.diagonal import Diag
from lapwing.curvature.structure import Structure, Trial
from lapwing.curvature.summation import Accumulator
from lapwing.curvature.survey import plural
from lapwing.curvature.workload import Workload
from lapwing.linalg import add_gram_, mirror_
from lapwing.network.jacobian import Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, DenseCurvature, LowRankCurvature, stacked

_PENDING_ROWS = 1024  # rows gathered before they are multiplied out: few large products instead of many small ones


@dataclass(frozen=True)
class Full(Structure):
    """Every entry of H: exact. Kept as rows while there are fewer rows than parameters, else as a matrix."""

    additive = True
    resumable = True
    exact = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DenseSum(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p**2

    def row_floats(self, sizes: RowSizes) -> int:
        return 2 * sizes.dense

    def n_rows(self, work: Workload) -> int | None:
        """Rows of the data, where they are kept in place of the matrix.

        The matrix must fit nevertheless: the number of data that is announced is not what they must give.
        """
        return work.n_rows if self.needed_bytes(work) <= work.budget else None

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        return rows_or_matrix_bytes(self, work, trial, self.n_rows(work), work.p)

    def fit_macs(self, work: Workload) -> float:
        return work.pass_macs + work.dense_row_macs + gram_macs(work, self.n_rows(work))

    def coverage(self, work: Workload) -> str:
        return rows_or_matrix(self.n_rows(work))


def rows_or_matrix(n_rows: int | None) -> str:
    return "full matrix" if n_rows is None else f"{plural(n_rows, 'row')} of the data, exactly"


def gram_macs(work: Workload, n_rows: int | None) -> float:
    """Of the kernel between all rows, or of the matrix, per datum."""
    if n_rows is None:
        return work.columns * work.p**2 / 2
    return work.columns * n_rows * min(work.p, work.survey.linearised.sizes.factored)


def rows_or_matrix_bytes(
    structure: Structure, work: Workload, trial: Trial, n_rows: int | None, largest: int
) -> tuple[int, int, int]:
    """Counted, besides the passes: the matrix and the rows folded into it; then a scaled copy, sum and factor."""
    fit, predict = trial.tried(Diag())
    if n_rows is not None:
        kernel, stored = 8 * n_rows**2, 8 * n_rows * work.survey.linearised.sizes.factored
        return stored, stored + 3 * kernel + fit, stored + 4 * kernel + predict
    matrix, stored = 8 * largest**2, structure.stored_bytes(work)
    return stored, stored + 2 * matrix + fit, 2 * stored + 3 * matrix + predict


class DenseSum(Accumulator):
    def __init__(self, p: int, device: torch.device) -> None:
        self.p, self.device = p, device
        self.pieces: list[Jacobian] = []
        self.n_pending = 0
        self.H: Tensor | None = None

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            self.pieces.append(rows if self.H is not None else rows.kept())
            self.n_pending += rows.n * rows.c
            # N·C < P: the rows are the smaller side, and small Gram matrices replace the P × P one.
            if self.n_pending >= (self.p if self.H is None else min(self.p, _PENDING_ROWS)):
                self._fold()

    def result(self) -> Curvature:
        if self.H is not None:
            self._fold()
            return DenseCurvature.of(mirror_(self.H))
        H = LowRankCurvature.of(stacked(self.pieces))
        H.spectrum()  # kept with the rows: every evidence and every prediction starts from their kernel
        return H

    def state(self) -> State:
        return {"pieces": self.pieces, "n_pending": self.n_pending, "H": self.H}

    def restore(self, state: State) -> None:
        self.pieces, self.n_pending, self.H = list(state["pieces"]), state["n_pending"], state["H"]

    def _fold(self) -> None:
        if self.H is None:
            self.H = torch.zeros(self.p, self.p, dtype=torch.float64, device=self.device)
        if self.pieces:
            add_gram_(self.H, torch.cat([piece.dense().flatten(0, 1) for piece in self.pieces]))
        self.pieces, self.n_pending = [], 0
