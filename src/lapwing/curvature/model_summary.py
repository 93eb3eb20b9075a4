"""The parameters of a model as blocks with shapes and costs, from a trace of one datum."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lapwing.data import ModelInput
from lapwing.linalg import stored_dtype
from lapwing.network.jacobian import Block, FactorBlock
from lapwing.network.linearised import MOST_DOUBLE, Linearised
from lapwing.network.parameters import ParamLayout
from lapwing.operators import MOST_KEPT, WHOLE, Leading

MAX_DENSE_BLOCK = 1_024  # entries up to which a tensor without a Kronecker rule gets its exact dense block
MOST_DOUBLE_DIAGONAL = 1 << 20  # entries above which the diagonal of such a tensor is float32
KRONECKER, DENSE, DIAGONAL = "Kronecker block", "exact dense block", "exact diagonal"


@dataclass(frozen=True)
class ParameterBlock:
    """Parameters treated together: a weight (q, o, i) used at r positions per datum, or a tensor of p entries."""

    slices: tuple[slice, ...]
    maps: tuple[int, int, int] | None  # (q groups, o outputs, i inputs); None without a Kronecker rule
    r: int
    row_floats: int  # numbers per row of the Jacobian, without the layer's inputs
    dtype: torch.dtype = torch.float64  # of the rows
    leading: Leading = WHOLE  # which factors are kept as leading directions

    @classmethod
    def of(cls, block: Block) -> ParameterBlock:
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
        """How `kron` treats it."""
        if self.maps is not None:
            return KRONECKER
        return DENSE if self.p <= MAX_DENSE_BLOCK else DIAGONAL

    @property
    def stored_bytes(self) -> int:
        """Bytes of both factors, the dense block, or the diagonal, in the dtype they are stored in."""
        if self.treatment == KRONECKER:
            return sum(self._stored(side).itemsize * q * side * columns for q, side, columns in self._sides)
        return 8 * self.p**2 if self.treatment == DENSE else diagonal_dtype(self.p).itemsize * self.p

    @property
    def derived_bytes(self) -> int:
        """Bytes that predictions derive and keep: eigenvectors in float64 and float32 (large ones replace their
        factors) and inverse eigenvalues; a Cholesky factor; a diagonal."""
        if self.treatment != KRONECKER:
            return self.stored_bytes
        # The eigenvectors of a sketch replace it.
        doubles = sum(q * side**2 for q, side, columns in self._sides if self._keeps_sum(side, columns))
        copies = 12 if self.dtype == torch.float32 else 8
        return copies * doubles + (self.dtype.itemsize * self.p if self.p <= MOST_KEPT else 0)

    @property
    def temporary_bytes(self) -> int:
        """Temporary bytes: of the largest eigendecomposition (the matrix, a copy, the eigenvectors and a workspace of
        three matrices), of the inverse eigenvalues, or of a diagonal."""
        if self.treatment != KRONECKER:
            return 0 if self.treatment == DENSE else 2 * self.stored_bytes
        # 48 = 6 matrices of 8 bytes per entry.
        decomposition = max(
            48 * side * columns
            + (0 if self._keeps_sum(side, columns) else self._stored(side).itemsize * q * side * columns)
            for q, side, columns in self._sides
        )
        return max(decomposition, 20 * self.p)

    @property
    def _sides(self) -> tuple[tuple[int, int, int], ...]:
        """(q, side, columns) of B and of A; a factor kept as leading directions has fewer columns than rows."""
        q, o, i = self.maps or (0, 0, 0)
        return (q, o, self.leading.directions(o, i) or o), (q, i, self.leading.directions(i, o) or i)

    @property
    def n_leading(self) -> int:
        """Factors kept as leading directions."""
        return sum(columns < side for _, side, columns in self._sides)

    def _stored(self, side: int) -> torch.dtype:
        return stored_dtype(side, self.dtype)

    def _keeps_sum(self, side: int, columns: int) -> bool:
        """Whether a factor keeps its sum beside its eigenvectors."""
        return columns == side and self._stored(side) == torch.float64

    def datum_floats(self, k: int) -> int:
        """Numbers to store k rows of one datum: inputs and output gradients, or all entries, whichever are fewer."""
        q, _, i = self.maps or (0, 0, 0)
        return min(self.r * q * i + k * self.row_floats, k * self.p)

    @property
    def macs(self) -> int:
        """Multiplications of the forward pass, per datum."""
        q, o, i = self.maps or (0, 0, 0)
        return self.p if self.maps is None else self.r * q * o * i

    @property
    def output_macs(self) -> int:
        """Multiplications of both factors if the layer is the output layer, with r likelihood terms: r (i² + o²)."""
        _, o, i = self.maps or (0, 0, 0)
        return self.r * (i**2 + o**2)

    def factor_macs(self, columns: int) -> int:
        """Multiplications of both Kronecker factors: r q i² for A, once; r q o² for B, per column of SᵀJ.

        A sketch takes 2 r q i k for k directions: no triangle of it can be left out.
        """
        (q, o, k), (_, i, m) = self._sides
        each = (i * (m if m == i else 2 * m)) + columns * o * (k if k == o else 2 * k)
        return self.r * q * each

    @property
    def cubes(self) -> int:
        """q (o³ + i³): the cost of the eigendecompositions, up to a constant; d k² for k of d directions."""
        return sum(q * side * columns**2 for q, side, columns in self._sides)


@dataclass(frozen=True, eq=False)
class ModelSummary:
    """The parameter blocks of a linearised model, from one forward and one backward pass, run on first use."""

    linearised: Linearised
    x: ModelInput

    def under(self, leading: Leading) -> ModelSummary:
        """The same blocks with factors kept as leading directions where `leading` says so."""
        summary = replace(self)
        vars(summary)["blocks"] = tuple(replace(block, leading=leading) for block in self.blocks)
        return summary

    @property
    def layout(self) -> ParamLayout:
        return self.linearised.layout

    @cached_property
    def blocks(self) -> tuple[ParameterBlock, ...]:
        # One datum is enough: shapes and treatments do not depend on the data.
        with self.linearised.trace(self.x.rows(slice(0, 1))) as trace:
            rows = trace.rows(torch.ones_like(trace.f)[..., None])
            return tuple(ParameterBlock.of(block) for block in rows.blocks)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the curvature in Kronecker form."""
        return sum(block.stored_bytes for block in self.blocks)

    @property
    def derived_bytes(self) -> int:
        """Bytes that predictions derive from it: stored, and temporary at the peak."""
        return sum(block.derived_bytes for block in self.blocks) + max(block.temporary_bytes for block in self.blocks)

    @property
    def posterior_bytes(self) -> int:
        """Bytes of a posterior without its curvature, i.e. its copy of the network; gradients are extra."""
        return sum(t.numel() * t.element_size() for t in self.linearised.network.tensors.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of the log likelihood in the fit statistics."""
        return self.layout.p * (8 if self.layout.p <= MOST_DOUBLE else 4)

    @property
    def row_bytes(self) -> int:
        """Bytes to store the rows of one datum."""
        dtype = self.linearised.network.dtype or torch.float64
        return dtype.itemsize * sum(block.datum_floats(self.linearised.k) for block in self.blocks)

    @property
    def cubes(self) -> int:
        return sum(block.cubes for block in self.blocks)

    def treatments(self) -> str:
        """How `kron` covers the parameters, with counts: "6 Kronecker blocks, 2 exact diagonals"."""
        counts = Counter(block.treatment for block in self.blocks)
        listed = [plural(counts[kind], kind) for kind in (KRONECKER, DENSE, DIAGONAL) if counts[kind]]
        low = sum(block.n_leading for block in self.blocks)
        return ", ".join([*listed, *([plural(low, "low-rank factor")] if low else [])])


def plural(number: int, noun: str) -> str:
    """1 block, 2 blocks."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def diagonal_dtype(size: int) -> torch.dtype:
    """Dtype of the diagonal of a tensor without a Kronecker rule: float32 for long ones, such as large embeddings."""
    return torch.float64 if size <= MOST_DOUBLE_DIAGONAL else torch.float32
