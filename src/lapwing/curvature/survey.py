"""What the parameters of a model consist of, seen on one datum: layers with Kronecker factors, and other tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing.data import ModelInput
from lapwing.linalg import stored_dtype
from lapwing.network.jacobian import Block, FactorBlock
from lapwing.network.linearised import MOST_DOUBLE, Linearised
from lapwing.network.parameters import ParamLayout
from lapwing.operators import MOST_KEPT

MAX_DENSE_BLOCK = 1_024  # entries of a tensor without a Kronecker rule that still get their exact dense block
MOST_DOUBLE_DIAGONAL = 1 << 20  # entries of such a tensor from which on its diagonal is float32
KRONECKER, DENSE, DIAGONAL = "Kronecker block", "exact dense block", "exact diagonal"


@dataclass(frozen=True)
class Tile:
    """Some parameters that are treated together: W (q, o, i) at r positions of a datum, or p loose numbers."""

    slices: tuple[slice, ...]
    maps: tuple[int, int, int] | None
    r: int
    row_floats: int  # numbers that one row of the Jacobian takes, besides the layer's inputs
    dtype: torch.dtype = torch.float64  # of the rows

    @classmethod
    def of(cls, block: Block) -> Tile:
        if not isinstance(block, FactorBlock):
            return cls(block.slices, None, 1, block.row_floats, block.dtype)
        maps = block.arrangement.q, block.arrangement.o, block.arrangement.i
        return cls(block.slices, maps, block.g.shape[2], block.row_floats, block.dtype)

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
    def kept_bytes(self) -> int:
        """Both factors, the dense block, or the diagonal; large factors and very long diagonals are float32."""
        if self.treatment == KRONECKER:
            return sum(self._square(side).itemsize * q * side**2 for q, side in self._sides)
        return 8 * self.p**2 if self.treatment == DENSE else loose_dtype(self.p).itemsize * self.p

    @property
    def derived_bytes(self) -> int:
        """What predictions keep besides: eigenvectors in float64 and float32 (large ones take the place of their
        factors) and inverse eigenvalues; a Cholesky factor; a diagonal."""
        if self.treatment != KRONECKER:
            return self.kept_bytes
        doubles = sum(q * side**2 for q, side in self._sides if self._square(side) == torch.float64)
        copies = 12 if self.dtype == torch.float32 else 8
        return copies * doubles + (self.dtype.itemsize * self.p if self.p <= MOST_KEPT else 0)

    @property
    def passing_bytes(self) -> int:
        """What is taken for a moment: by the largest decomposition (the matrix, a copy, the eigenvectors and the
        solver's workspace of three matrices), by the inverse eigenvalues, or by a diagonal."""
        if self.treatment != KRONECKER:
            return 0 if self.treatment == DENSE else 2 * self.kept_bytes
        decomposition = max(
            48 * side**2 + (self._square(side).itemsize * q * side**2 if self._square(side) != torch.float64 else 0)
            for q, side in self._sides
        )
        return max(decomposition, 20 * self.p)

    @property
    def _sides(self) -> tuple[tuple[int, int], ...]:
        q, o, i = self.maps or (0, 0, 0)
        return (q, o), (q, i)

    def _square(self, side: int) -> torch.dtype:
        return stored_dtype(side, self.dtype)

    def datum_floats(self, k: int) -> int:
        """Numbers that k rows of one datum take where they are kept: inputs and output gradients, or all entries."""
        q, _, i = self.maps or (0, 0, 0)
        return min(self.r * q * i + k * self.row_floats, k * self.p)

    @property
    def macs(self) -> int:
        """Multiplications of its forward pass, per datum."""
        q, o, i = self.maps or (0, 0, 0)
        return self.p if self.maps is None else self.r * q * o * i

    @property
    def output_macs(self) -> int:
        """Of both factors, where the r terms of a datum are the layer's own outputs: r (i² + o²)."""
        _, o, i = self.maps or (0, 0, 0)
        return self.r * (i**2 + o**2)

    def factor_macs(self, columns: int) -> int:
        """Of both Kronecker factors: r q i² for A, once; r q o² for B, per column."""
        q, o, i = self.maps or (0, 0, 0)
        return self.r * q * (i**2 + columns * o**2)

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
    def kept_bytes(self) -> int:
        """The curvature in Kronecker form."""
        return sum(tile.kept_bytes for tile in self.tiles)

    @property
    def derived_bytes(self) -> int:
        """What predictions keep of it besides, and take for a moment."""
        return sum(tile.derived_bytes for tile in self.tiles) + max(tile.passing_bytes for tile in self.tiles)

    @property
    def posterior_bytes(self) -> int:
        """A posterior without its curvature: the copy of the network. Gradients come on top for every part."""
        return sum(t.numel() * t.element_size() for t in self.linearised.network.tensors.values())

    @property
    def gradient_bytes(self) -> int:
        """The log likelihood's gradient, as the fit statistics keep it."""
        return self.layout.p * (8 if self.layout.p <= MOST_DOUBLE else 4)

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
        return ", ".join(plural(counts[kind], kind) for kind in (KRONECKER, DENSE, DIAGONAL) if counts[kind])


def plural(number: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def loose_dtype(size: int) -> torch.dtype:
    """What the diagonal of a tensor without a Kronecker rule is kept in: float32 for a table of many tokens."""
    return torch.float64 if size <= MOST_DOUBLE_DIAGONAL else torch.float32
