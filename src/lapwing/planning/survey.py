"""What the parameters of a model consist of, seen on one datum: layers with Kronecker factors, and other tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing.curvature.kronecker import MAX_DENSE_BLOCK
from lapwing.data import ModelInput
from lapwing.jacobian import Block, FactorBlock
from lapwing.linearise import Linearised
from lapwing.params import ParamLayout

KRONECKER, DENSE, DIAGONAL = "Kronecker block", "exact dense block", "exact diagonal"


@dataclass(frozen=True)
class Tile:
    """Some parameters that are treated together: W (q, o, i) at r positions of a datum, or p loose numbers."""

    slices: tuple[slice, ...]
    maps: tuple[int, int, int] | None
    r: int
    row_floats: int  # numbers that one row of the Jacobian takes, besides the layer's inputs

    @classmethod
    def of(cls, block: Block) -> Tile:
        if not isinstance(block, FactorBlock):
            return cls(block.slices, None, 1, block.row_floats)
        maps = block.arrangement.q, block.arrangement.o, block.arrangement.i
        return cls(block.slices, maps, block.g.shape[2], block.row_floats)

    @property
    def p(self) -> int:
        return sum(s.stop - s.start for s in self.slices)

    @property
    def whole(self) -> slice:
        return slice(min(s.start for s in self.slices), max(s.stop for s in self.slices))

    @property
    def treatment(self) -> str:
        """What `kron` does with it."""
        if self.maps is not None:
            return KRONECKER
        return DENSE if self.p <= MAX_DENSE_BLOCK else DIAGONAL

    @property
    def kept_floats(self) -> int:
        """Both factors, the dense block, or the diagonal."""
        return {KRONECKER: self.squares, DENSE: self.p**2, DIAGONAL: self.p}[self.treatment]

    def datum_floats(self, k: int) -> int:
        """Numbers that k rows of one datum take where they are kept: inputs and output gradients, or all entries."""
        q, _, i = self.maps or (0, 0, 0)
        return min(self.r * q * i + k * self.row_floats, k * self.p)

    @property
    def squares(self) -> int:
        """q (o² + i²)."""
        q, o, i = self.maps or (0, 0, 0)
        return q * (o**2 + i**2)

    @property
    def cubes(self) -> int:
        """q (o³ + i³), to which the time of the eigendecompositions is proportional."""
        q, o, i = self.maps or (0, 0, 0)
        return q * (o**3 + i**3)


@dataclass(frozen=True, eq=False)
class Survey:
    """The tiles of a linearised model; found by one forward and one backward pass when first asked for."""

    linearised: Linearised
    x: ModelInput

    @property
    def layout(self) -> ParamLayout:
        return self.linearised.layout

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        with self.linearised.trace(self.x.rows(slice(0, 1))) as trace:
            rows = trace.rows(torch.ones_like(trace.f)[..., None])
            return tuple(Tile.of(block) for block in rows.blocks)

    @property
    def kept_floats(self) -> int:
        return sum(tile.kept_floats for tile in self.tiles)

    @property
    def row_bytes(self) -> int:
        """What the rows of one datum take where they are kept."""
        dtype = self.linearised.network.dtype or torch.float64
        return dtype.itemsize * sum(tile.datum_floats(self.linearised.k) for tile in self.tiles)

    @property
    def cubes(self) -> int:
        return sum(tile.cubes for tile in self.tiles)

    def treatments(self) -> str:
        """How `kron` covers the parameters, with counts: "6 Kronecker blocks, 2 exact diagonals"."""
        counts = Counter(tile.treatment for tile in self.tiles)
        return ", ".join(counted(counts[kind], kind) for kind in (KRONECKER, DENSE, DIAGONAL) if counts[kind])


def counted(number: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{number} {noun}" + ("s" if number != 1 else "")
