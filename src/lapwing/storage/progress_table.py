"""Types that only checkpoints hold: rows of data, unchanged, so that resumed sums are bit-identical."""

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
from lapwing.tuning import TuningState


@dataclass(frozen=True, eq=False)
class _KeptRows:
    """The form of a Jacobian in a file: without its device."""

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
    """The form of an OutputBlock in a file: with its layer inputs as a tensor."""

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
    "LowRankCurvature": Entry(LowRankCurvature),  # rows as they are; a posterior's file rotates them
    "Expansion": Entry(Expansion),  # with the outputs of the data
    "Position": Entry(TuningState),
}


def progress_table() -> Table:
    """The table of posteriors, extended by rows that are still being accumulated."""
    finished = table()
    return Table({**finished.entries, **_ROWS}, finished.constants)
