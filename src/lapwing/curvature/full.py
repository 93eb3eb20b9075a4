"""Full curvature: every entry of H, as a matrix or as the rows it is made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lapwing._types import State, Tensor
from lapwing.curvature.accumulator import Accumulator
from lapwing.curvature.diagonal import Diag
from lapwing.curvature.model_summary import plural
from lapwing.curvature.structure import Structure, Trial
from lapwing.curvature.workload import Workload
from lapwing.linalg import add_gram_, mirror_
from lapwing.network.jacobian import Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, DenseCurvature, LowRankCurvature, stacked

_PENDING_ROWS = 1024  # rows collected before they are multiplied: one large matrix product is faster than many small


@dataclass(frozen=True)
class Full(Structure):
    """H = Σ JᵀΛJ without approximation.

    Kept as rows SᵀJ while there are fewer rows than parameters, else as a matrix.
    """

    additive = True
    resumable = True
    exact = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DenseAccumulator(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p**2

    def row_floats(self, sizes: RowSizes) -> int:
        return 2 * sizes.dense

    def n_rows(self, work: Workload) -> int | None:
        """Rows of the data, if they are kept instead of the matrix; None if the matrix is kept.

        The matrix must fit into the budget in any case: the loader may announce fewer data than it yields.
        """
        return work.n_rows if self.needed_bytes(work) <= work.budget else None

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        return rows_or_matrix_bytes(self, work, trial, self.n_rows(work), work.p)

    def fit_macs(self, work: Workload) -> float:
        return work.pass_macs + work.dense_row_macs + gram_macs(work, self.n_rows(work))

    def coverage(self, work: Workload) -> str:
        return rows_or_matrix(self.n_rows(work))


def rows_or_matrix(n_rows: int | None) -> str:
    """For the table of `lw.plan`."""

    return "full matrix" if n_rows is None else f"{plural(n_rows, 'row')} of the data, exactly"


def gram_macs(work: Workload, n_rows: int | None) -> float:
    """Multiplications per datum of the kernel between all rows, or of the P × P matrix if `n_rows` is None."""
    if n_rows is None:
        return work.columns * work.p**2 / 2
    return work.columns * n_rows * min(work.p, work.summary.linearised.sizes.factored)


def rows_or_matrix_bytes(
    structure: Structure, work: Workload, trial: Trial, n_rows: int | None, largest: int
) -> tuple[int, int, int]:
    """Bytes to store, at the peak of a fit, at the peak of a prediction: those of a trial of `Diag`, and the matrices.

    While fitting: the matrix and the block of rows added to it. While predicting: the scaled matrix, the sum, its
    factor.
    """
    fit, predict = trial.measured_bytes(Diag())
    if n_rows is not None:
        kernel, stored = 8 * n_rows**2, 8 * n_rows * work.summary.linearised.sizes.factored
        return stored, stored + 3 * kernel + fit, stored + 4 * kernel + predict
    matrix, stored = 8 * largest**2, structure.stored_bytes(work)
    return stored, stored + 2 * matrix + fit, 2 * stored + 3 * matrix + predict


class DenseAccumulator(Accumulator):
    """Running H (p, p) = Σ (SᵀJ)ᵀ(SᵀJ). Keeps the rows themselves until there are as many as parameters."""

    def __init__(self, p: int, device: torch.device) -> None:
        self.p, self.device = p, device
        self.pieces: list[Jacobian] = []
        self.n_pending = 0
        self.H: Tensor | None = None

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            # Rows that may be the result are stored in compressed form; those about to be added to H are not.
            self.pieces.append(rows if self.H is not None else rows.kept())
            self.n_pending += rows.n * rows.c
            # N·C < P: the rows are the smaller side, and small Gram matrices replace the P × P one.
            if self.n_pending >= (self.p if self.H is None else min(self.p, _PENDING_ROWS)):
                self._fold()

    def result(self) -> Curvature:
        """H as a dense matrix, or as rows if there were fewer rows than parameters."""
        if self.H is not None:
            self._fold()
            return DenseCurvature.of(mirror_(self.H))
        H = LowRankCurvature.of(stacked(self.pieces))
        H.spectrum()  # stored with the rows: evidence and predictions both start from the kernel between rows
        return H

    def state(self) -> State:
        return {"pieces": self.pieces, "n_pending": self.n_pending, "H": self.H}

    def restore(self, state: State) -> None:
        self.pieces, self.n_pending, self.H = list(state["pieces"]), state["n_pending"], state["H"]

    def _fold(self) -> None:
        """H ← H + Σ (SᵀJ)ᵀ(SᵀJ) over the pending rows."""
        if self.H is None:
            self.H = torch.zeros(self.p, self.p, dtype=torch.float64, device=self.device)
        if self.pieces:
            add_gram_(self.H, torch.cat([piece.dense().flatten(0, 1) for piece in self.pieces]))
        self.pieces, self.n_pending = [], 0
