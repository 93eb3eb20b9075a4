"""What the file of unfinished work may hold besides: rows of data as they are, for it must go on to the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.linear_model import Expansion
from lapwing.network.jacobian import (
    Block,
    DenseBlock,
    EmbeddingBlock,
    FactorBlock,
    Given,
    Images,
    Jacobian,
    OutputBlock,
    SparseBlock,
)
from lapwing.operators import Arrangement, LowRankCurvature
from lapwing.storage.codec import Entry, Table
from lapwing.storage.table import table
from lapwing.tuning import Position


@dataclass(frozen=True, eq=False)
class _KeptRows:
    """A Jacobian without its device."""

    blocks: tuple[Block, ...]
    n: int
    c: int
    p: int

    @classmethod
    def of(cls, rows: Jacobian) -> _KeptRows:
        return cls(rows.blocks, rows.n, rows.c, rows.p)

    def restored(self, device: torch.device) -> Jacobian:
        return Jacobian(self.blocks, self.n, self.c, self.p, device)


@dataclass(frozen=True, eq=False)
class _KeptOutput:
    """An OutputBlock whose inputs are there."""

    arrangement: Arrangement
    a: Float[Tensor, "n r i"]
    U: Float[Tensor, "c o"] | None

    @classmethod
    def of(cls, block: OutputBlock) -> _KeptOutput:
        return cls(block.arrangement, block.a, block.U)

    def restored(self, device: torch.device) -> OutputBlock:
        return OutputBlock.given(self.arrangement, self.a, self.U)


_ROWS = {
    "Jacobian": Entry(Jacobian, _KeptRows.of, form=_KeptRows, restored=_KeptRows.restored),
    "OutputBlock": Entry(OutputBlock, _KeptOutput.of, form=_KeptOutput, restored=_KeptOutput.restored),
    "FactorBlock": Entry(FactorBlock, FactorBlock.formed),
    "ThinnedBlock": Entry(SparseBlock, SparseBlock.formed),
    "Given": Entry(Given),
    "Images": Entry(Images),
    "DenseBlock": Entry(DenseBlock),
    "EmbeddingBlock": Entry(EmbeddingBlock),
    "LowRankCurvature": Entry(LowRankCurvature),  # not turned
    "Expansion": Entry(Expansion),  # with the outputs of the data
    "Position": Entry(Position),
}


def progress_table() -> Table:
    """What a file of unfinished work may hold: what a posterior may, and rows that are still being added up."""
    finished = table()
    return Table({**finished.entries, **_ROWS}, finished.constants)
