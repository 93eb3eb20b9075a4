"""The diagonal of the curvature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from lapwing._types import State, Tensor
from lapwing.curvature.layer_products import LayerProducts
from lapwing.curvature.output_layer import OutputTerms
from lapwing.curvature.structure import Structure
from lapwing.curvature.summation import Accumulator
from lapwing.curvature.workload import Workload
from lapwing.linalg import at_least_float32
from lapwing.network.jacobian import EmbeddingBlock, FactorBlock, Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Curvature, DiagonalCurvature


@dataclass(frozen=True)
class Diag(Structure):
    """The diagonal of H only."""

    adds_output = True
    by_column = True
    additive = True
    resumable = True
    sketches = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DiagonalSum(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored

    def fit_macs(self, work: Workload) -> float:
        if work.closed_output:
            return work.pass_macs + sum(tile.macs for tile in work.tiles)
        return work.pass_macs + sum(tile.macs * (work.columns if tile.r > 1 else 1) for tile in work.tiles)

    def coverage(self, work: Workload) -> str:
        return "exact diagonal"


class DiagonalSum(Accumulator):
    """Σ over rows of their squared entries."""

    def __init__(self, p: int, device: torch.device, dtype: torch.dtype = torch.float64) -> None:
        self.entries = torch.zeros(p, dtype=dtype, device=device)
        self.layers = LayerProducts(self.entries)

    def add(self, pieces: Iterable[Jacobian]) -> None:
        layers: dict[int, _LayerSquares] = {}
        for rows in pieces:
            self._add(rows, layers)
            del rows  # the gradients of the next column are written where these were, in the processor's cache
        for layer in layers.values():
            layer.fold(self.layers)

    def _add(self, rows: Jacobian, layers: dict[int, _LayerSquares]) -> None:
        for number, block in enumerate(rows.blocks):
            if isinstance(block, FactorBlock):
                layers.setdefault(number, _LayerSquares(block)).add(block)
            elif isinstance(block, EmbeddingBlock):
                block.add_squares_(self.entries[block.where])
            else:
                for s, squares in zip(block.slices, block.sum_squares(), strict=True):
                    self.entries[s] += squares

    def add_output(self, terms: OutputTerms) -> None:
        diagonals, squares, ones = terms.squares()
        self.layers.add(terms.block.arrangement, diagonals, squares, ones=ones)

    def result(self) -> Curvature:
        self.layers.finish()
        return DiagonalCurvature(self.entries)

    def state(self) -> State:
        return self.layers.state()

    def restore(self, state: State) -> None:
        self.layers.restore(state)


class _LayerSquares:
    """The squares of a layer's rows for some data, over the columns that come one after the other.

    At one position Σ_c (g_co a_i)² = (Σ_c g_co²) a_i²: a row per datum, whatever the number of columns. At several the
    positions add up before squaring, and the squares of all data and columns are added here.
    """

    def __init__(self, first: FactorBlock) -> None:
        self.arrangement, self.inputs, self.one_position = first.arrangement, first.inputs, first.one_position
        self.total: Tensor | None = None

    def add(self, block: FactorBlock) -> None:
        if not self.one_position:
            squares = block.squared_products()
            self.total = squares if self.total is None else self.total.add_(squares)
            return
        for g in at_least_float32(block.g[:, :, 0]).unbind(1):
            self.total = g.square() if self.total is None else self.total.addcmul_(g, g)

    def fold(self, layers: LayerProducts) -> None:
        assert self.total is not None
        if self.one_position:
            a, ones = self.inputs.columns()
            layers.add(self.arrangement, self.total, at_least_float32(a[:, 0]).square(), ones=ones)
        else:
            layers.add_product(self.arrangement, self.total)
