"""The structure: how the rows SᵀJ are added up, and what is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lapwing.curvature import Structure
from lapwing.curvature.accumulator import Accumulator
from lapwing.network.jacobian import Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from toy_structure.operator import LevelCurvature


@dataclass(frozen=True)
class Level(Structure):
    additive = True
    file_values = (LevelCurvature,)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return LevelSum(layout, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return len(layout.names) + layout.p

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored


class LevelSum(Accumulator):
    def __init__(self, layout: ParamLayout, device: torch.device) -> None:
        self.squares = torch.zeros(layout.p, dtype=torch.float64, device=device)
        sizes = torch.tensor([layout[name].stop - layout[name].start for name in layout.names])
        self.tensor_of = torch.arange(len(sizes)).repeat_interleave(sizes).to(device)

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            self.squares += rows.sum_squares()

    def result(self) -> LevelCurvature:
        sums = torch.zeros(int(self.tensor_of.max()) + 1, dtype=torch.float64).index_add(
            0, self.tensor_of, self.squares
        )
        return LevelCurvature(sums / self.tensor_of.bincount(), self.tensor_of)
