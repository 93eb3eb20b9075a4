"""Diagonal curvature: diag H = Σ (SᵀJ)² over the rows of all data, without forming the rows of dense layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lapwing._types import State, Tensor
from lapwing.curvature.accumulator import Accumulator
from lapwing.curvature.layer_products import LayerProducts
from lapwing.curvature.output_layer import OutputTerms
from lapwing.curvature.structure import Structure
from lapwing.curvature.workload import Workload
from lapwing.linalg import at_least_float32
from lapwing.network.jacobian import EmbeddingBlock, FactorBlock, Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, DiagonalCurvature


@dataclass(frozen=True)
class Diag(Structure):
    """The diagonal of H = Σ JᵀΛJ. All correlations are dropped."""

    adds_output = True
    by_column = True
    additive = True
    resumable = True
    sketches = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DiagonalAccumulator(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored

    def fit_macs(self, work: Workload) -> float:
        if work.closed_output:
            return work.pass_macs + sum(block.macs for block in work.blocks)
        return work.pass_macs + sum(block.macs * (work.columns if block.r > 1 else 1) for block in work.blocks)

    def coverage(self, work: Workload) -> str:
        return "exact diagonal"


class DiagonalAccumulator(Accumulator):
    """Running diag H (p,) = Σ (SᵀJ)², entry by entry."""

    def __init__(self, p: int, device: torch.device, dtype: torch.dtype = torch.float64) -> None:
        self.entries = torch.zeros(p, dtype=dtype, device=device)
        self.layers = LayerProducts(self.entries)

    def add(self, pieces: Iterable[Jacobian]) -> None:
        layers: dict[int, _LayerSquares] = {}
        for rows in pieces:
            self._add(rows, layers)
            del rows  # free before the next column: its gradients then reuse memory that is still in the cache
        for layer in layers.values():
            layer.fold(self.layers)

    def _add(self, rows: Jacobian, layers: dict[int, _LayerSquares]) -> None:
        for number, block in enumerate(rows.blocks):
            # Layers collect all columns of these data first: one product (Σ_c g²) (a²)ᵀ then serves all columns.
            if isinstance(block, FactorBlock):
                layers.setdefault(number, _LayerSquares(block)).add(block)
            # Only the rows of tokens that occur are touched; the table may be far larger than the data.
            elif isinstance(block, EmbeddingBlock):
                block.add_squares_(self.entries[block.where])
            else:
                for s, squares in zip(block.slices, block.sum_squares(), strict=True):
                    self.entries[s] += squares

    def add_output(self, terms: OutputTerms) -> None:
        diagonals, squares, ones = terms.squares()
        self.layers.add(terms.block.arrangement, diagonals, squares, ones=ones)

    def result(self) -> Curvature:
        # Flush the rows that the layers have collected but not yet multiplied.
        self.layers.finish()
        return DiagonalCurvature(self.entries)

    def state(self) -> State:
        return self.layers.state()

    def restore(self, state: State) -> None:
        self.layers.restore(state)


class _LayerSquares:
    """Sum of squared rows of one layer for some data, over the columns of S, which arrive one after the other.

    With one position per datum, Σ_c (g_co a_i)² = (Σ_c g_co²) a_i²: squares of g are summed over columns, and
    multiplied with those of a once (`fold`). With several positions the row is Σ_t g_t a_tᵀ, which must be summed over
    t before it is squared; then the squares of all data and columns are summed here, at the size of the weight.
    """

    def __init__(self, first: FactorBlock) -> None:
        self.arrangement, self.inputs, self.one_position = first.arrangement, first.inputs, first.one_position
        self.total: Tensor | None = None

    def add(self, block: FactorBlock) -> None:
        if not self.one_position:
            squares = block.squared_products()
            self.total = squares if self.total is None else self.total.add_(squares)
            return
        # float32 is enough for squares of single gradients; sums over many data are taken in float64 (`LayerProducts`).
        for g in at_least_float32(block.g[:, :, 0]).unbind(1):
            self.total = g.square() if self.total is None else self.total.addcmul_(g, g)

    def fold(self, layers: LayerProducts) -> None:
        """Add Σ_c g_co² a_i², or the squares summed over positions, to the diagonal of the layer."""
        assert self.total is not None
        if self.one_position:
            a, ones = self.inputs.columns()
            layers.add(self.arrangement, self.total, at_least_float32(a[:, 0]).square(), ones=ones)
        else:
            layers.add_product(self.arrangement, self.total)
