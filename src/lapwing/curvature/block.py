"""Block-diagonal curvature: one dense block for the parameters of each module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lapwing._types import State
from lapwing.curvature.accumulator import Accumulator
from lapwing.curvature.full import DenseAccumulator, rows_or_matrix_bytes
from lapwing.curvature.model_summary import plural
from lapwing.curvature.structure import Structure, Trial
from lapwing.curvature.workload import Workload
from lapwing.network.jacobian import Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import BlockDiagonalCurvature, Curvature


@dataclass(frozen=True)
class Block(Structure):
    """One dense block Σ JᵀΛJ per module (its weight and bias together). Correlations between modules are dropped."""

    additive = True
    resumable = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return _BlockAccumulator(layout, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return sum((s.stop - s.start) ** 2 for s in layout.module_slices.values())

    def row_floats(self, sizes: RowSizes) -> int:
        return 2 * sizes.dense

    def peak_bytes(self, work: Workload, trial: Trial) -> tuple[int, int, int]:
        largest = max(s.stop - s.start for s in work.layout.module_slices.values())
        return rows_or_matrix_bytes(self, work, trial, None, largest)

    def coverage(self, work: Workload) -> str:
        return plural(len(work.layout.modules), "dense block")


class _BlockAccumulator(Accumulator):
    """One dense accumulator per module; a row SᵀJ is split into the columns of each module."""

    def __init__(self, layout: ParamLayout, device: torch.device) -> None:
        self.slices = tuple(layout.module_slices.values())
        self.blocks = [DenseAccumulator(s.stop - s.start, device) for s in self.slices]

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            for s, block in zip(self.slices, self.blocks, strict=True):
                block.add([rows.columns(s)])

    def result(self) -> Curvature:
        return BlockDiagonalCurvature(self.slices, tuple(block.result() for block in self.blocks))

    def state(self) -> State:
        return {"blocks": [block.state() for block in self.blocks]}

    def restore(self, state: State) -> None:
        for block, kept in zip(self.blocks, state["blocks"], strict=True):
            block.restore(kept)
