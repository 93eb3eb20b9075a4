"""Structures: how the rows SᵀJ of the data are added up into a Curvature.

Curvature is a sum over data, so an accumulator only ever adds; batches, chunks and their order do not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lapwing._types import Float, State, Tensor
from lapwing.curvature.factors import Fisher
from lapwing.curvature.output_layer import OutputTerms
from lapwing.curvature.shards import over_ranks
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Products, add_gram_, mirror_, single_or_better
from lapwing.network.jacobian import EmbeddingBlock, FactorBlock, Jacobian, RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import (
    Arrangement,
    BlockDiagonalCurvature,
    Curvature,
    DenseCurvature,
    DiagonalCurvature,
    LowRankCurvature,
    stacked,
)

if TYPE_CHECKING:
    from lapwing.curvature.estimate import Pass
    from lapwing.curvature.gauss_newton import GaussNewton
    from lapwing.curvature.points import Source


class Accumulator(ABC):
    """A running sum of rows' outer products, in one structure."""

    def see(self, part: Float[Tensor, "n t c m"]) -> None:  # noqa: B027 (most have nothing to note)
        """The columns S of the rows SᵀJ that are added next; most sums need not know them."""

    @abstractmethod
    def add(self, pieces: Iterable[Jacobian]) -> None:
        """Add the rows of some data, which come some columns at a time."""

    def add_output(self, terms: OutputTerms) -> None:
        """Add the likelihood terms of some data, when the output layer alone is inferred."""
        raise NotImplementedError(f"{type(self).__name__} adds rows only.")

    @abstractmethod
    def result(self) -> Curvature: ...

    def state(self) -> State:
        """All of the unfinished sum, to be written down between two batches."""
        raise NotImplementedError(f"{type(self).__name__} cannot be written down.")

    def restore(self, state: State) -> None:
        """Go on from there, to the same bits."""
        raise NotImplementedError(f"{type(self).__name__} cannot be written down.")


class Summation:
    """How rows are added up in a pass."""

    adds_output: bool = False  # whether an output layer inferred alone is added without rows
    by_column: bool = False  # whether rows are added as fast one column of S at a time, in less memory
    whole_data: bool = False  # whether all rows of a datum must come at once

    def roots(self, fisher: Fisher, likelihood: Likelihood, f: Tensor, y: Tensor) -> Sequence[Tensor]:
        """The columns S of each part of the curvature: (n, t, c, m)."""
        return fisher.parts(likelihood, f, y)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        raise NotImplementedError(f"{type(self).__name__} is not a sum over rows.")

    def accumulators(self, n_parts: int, layout: ParamLayout, device: torch.device) -> list[Accumulator]:
        """One for each part of the curvature."""
        return [self.accumulator(layout, device) for _ in range(n_parts)]

    def second_pass(self, parts: Sequence[Curvature]) -> Sequence[Accumulator] | None:
        """Accumulators for another pass over the data, given what the first one found; most need none."""
        return None

    def together(self, parts: Sequence[Curvature]) -> Sequence[Curvature]:
        """The parts of all data; those of this process are given, none when it has no data."""
        return over_ranks(parts)


@dataclass(frozen=True, eq=False)
class Work:
    """How which data are added up, and what the prior must be multiplied by to go with them."""

    summation: Summation | None  # None: nothing but the statistics
    data: Source
    prior_scale: float = 1.0


class Structure(Summation, ABC):
    """A choice of which entries of H are kept."""

    additive: bool = False  # whether the curvatures of two sets of data add up to that of both, exactly
    resumable: bool = False  # whether its unfinished sums can be written down
    by_products: bool = False  # whether it comes from products with H, pass by pass, not from a sum over rows
    most_rows: int = 1 << 60  # of outputs that are predicted at a time
    exact: bool = False  # whether nothing of H is lost
    all_data: bool = True  # whether the evidence is that of all data

    @property
    def described(self) -> str:
        """What posteriors of different structures are told apart by."""
        return type(self).__name__.lower()

    def prepared(self, sweep: Pass, data: Source) -> Work:
        """A look at the data before the pass, for structures that must know them; most need none."""
        return Work(self.summed, data)

    @property
    def summed(self) -> Structure | None:
        """The structure that the first pass sums over rows: this one, unless it comes from products alone."""
        return None if self.by_products else self

    def from_products(self, H: GaussNewton, n_parts: int, near: Sequence[Curvature]) -> Sequence[Curvature]:
        """The parts of the curvature, where they come from products; `near` is what the first pass summed."""
        raise NotImplementedError(f"{type(self).__name__} is a sum over rows.")

    def within(self, layout: ParamLayout, n_parts: int, floats: int) -> Structure:
        """The same with what it leaves to the memory decided: so many numbers are allowed."""
        return self

    @abstractmethod
    def stored_floats(self, layout: ParamLayout) -> int:
        """Numbers kept after the fit, at most."""

    def working_floats(self, layout: ParamLayout) -> int:
        """Numbers taken besides while products are worked on."""
        return 0

    @abstractmethod
    def row_floats(self, sizes: RowSizes) -> int:
        """Numbers one row SᵀJ takes while it is added or contracted."""

    def predicted_floats(self, sizes: RowSizes) -> int:
        """Numbers one row of J takes while outputs are predicted."""
        return self.row_floats(sizes)


@dataclass(frozen=True)
class Full(Structure):
    """Every entry of H: exact. Kept as rows while there are fewer rows than parameters, else as a matrix."""

    additive = True
    resumable = True
    exact = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DenseSum(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p**2

    def row_floats(self, sizes: RowSizes) -> int:
        return 2 * sizes.dense


@dataclass(frozen=True)
class Block(Structure):
    """One dense block per module: exact within a layer, nothing between layers."""

    additive = True
    resumable = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return _BlockSums(layout, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return sum((s.stop - s.start) ** 2 for s in layout.module_slices.values())

    def row_floats(self, sizes: RowSizes) -> int:
        return 2 * sizes.dense


@dataclass(frozen=True)
class Diag(Structure):
    """The diagonal of H only."""

    adds_output = True
    by_column = True
    additive = True
    resumable = True

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return DiagonalSum(layout.p, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return layout.p

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored


_PENDING_ROWS = 1024  # rows gathered before they are multiplied out: few large products instead of many small ones


class DenseSum(Accumulator):
    def __init__(self, p: int, device: torch.device) -> None:
        self.p, self.device = p, device
        self.pieces: list[Jacobian] = []
        self.n_pending = 0
        self.H: Tensor | None = None

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            self.pieces.append(rows if self.H is not None else rows.kept())
            self.n_pending += rows.n * rows.c
            # N·C < P: the rows are the smaller side, and small Gram matrices replace the P × P one.
            if self.n_pending >= (self.p if self.H is None else min(self.p, _PENDING_ROWS)):
                self._fold()

    def result(self) -> Curvature:
        if self.H is not None:
            self._fold()
            return DenseCurvature.of(mirror_(self.H))
        H = LowRankCurvature.of(stacked(self.pieces))
        H.spectrum()  # kept with the rows: every evidence and every prediction starts from their kernel
        return H

    def state(self) -> State:
        return {"pieces": self.pieces, "n_pending": self.n_pending, "H": self.H}

    def restore(self, state: State) -> None:
        self.pieces, self.n_pending, self.H = list(state["pieces"]), state["n_pending"], state["H"]

    def _fold(self) -> None:
        if self.H is None:
            self.H = torch.zeros(self.p, self.p, dtype=torch.float64, device=self.device)
        if self.pieces:
            add_gram_(self.H, torch.cat([piece.dense().flatten(0, 1) for piece in self.pieces]))
        self.pieces, self.n_pending = [], 0


class _BlockSums(Accumulator):
    def __init__(self, layout: ParamLayout, device: torch.device) -> None:
        self.slices = tuple(layout.module_slices.values())
        self.blocks = [DenseSum(s.stop - s.start, device) for s in self.slices]

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
        for g in single_or_better(block.g[:, :, 0]).unbind(1):
            self.total = g.square() if self.total is None else self.total.addcmul_(g, g)

    def fold(self, layers: LayerProducts) -> None:
        assert self.total is not None
        if self.one_position:
            a, ones = self.inputs.columns()
            layers.add(self.arrangement, self.total, single_or_better(a[:, 0]).square(), ones=ones)
        else:
            layers.add_product(self.arrangement, self.total)


class LayerProducts:
    """Σ x yᵀ of layers' rows, added to a flat vector of parameters once there are many of them."""

    def __init__(self, total: Float[Tensor, " p"]) -> None:
        self.total = total
        self.layers: dict[int, tuple[Arrangement, Products]] = {}  # by where a layer begins

    def add(
        self, arrangement: Arrangement, x: Float[Tensor, "m q o"], y: Float[Tensor, "m q i"], *, ones: bool = False
    ) -> None:
        """`ones`: y comes without its last column, the bias's."""
        _, products = self.layers.setdefault(arrangement.slices[0].start, (arrangement, Products()))
        products.add(x, y, ones=ones)
        if products.full:
            self._fold(arrangement, products)

    def add_product(self, arrangement: Arrangement, product: Float[Tensor, "q o i"]) -> None:
        """A sum that was multiplied out elsewhere."""
        arrangement.add_(self.total, product)

    def finish(self) -> None:
        for arrangement, products in self.layers.values():
            self._fold(arrangement, products)

    def state(self) -> State:
        layers = [{"arrangement": layer, "products": products.state()} for layer, products in self.layers.values()]
        return {"total": self.total, "layers": layers}

    def restore(self, state: State) -> None:
        self.total.copy_(state["total"])
        self.layers = {}
        for layer in state["layers"]:
            products = Products()
            products.restore(layer["products"])
            self.layers[layer["arrangement"].slices[0].start] = layer["arrangement"], products

    def _fold(self, arrangement: Arrangement, products: Products) -> None:
        product = products.take()
        if product is not None:
            self.add_product(arrangement, product)
