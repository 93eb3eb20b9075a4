"""Kronecker-factored curvature (K-FAC) from captured layer inputs a and output gradients g: H_layer ≈ B ⊗ A.

expand: A = 1/(N R) Σ_nt a aᵀ, B = Σ_nt g gᵀ.   reduce: with ā = mean_t a and ĝ = Σ_t g, A = 1/N Σ ā āᵀ, B = Σ ĝ ĝᵀ.
(Martens and Grosse, 2015; Eschenhagen et al., 2023.) Sums are stored and the mean of A is taken at the end, so the
result does not depend on the batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, State, Tensor
from lapwing.curvature.accumulator import Accumulator
from lapwing.curvature.diagonal import DiagonalAccumulator
from lapwing.curvature.full import DenseAccumulator
from lapwing.curvature.model_summary import MAX_DENSE_BLOCK, diagonal_dtype
from lapwing.curvature.output_layer import OutputGram, OutputTerms
from lapwing.curvature.structure import Structure
from lapwing.curvature.workload import Workload
from lapwing.errors import InputError
from lapwing.linalg import GramSum, stored_dtype
from lapwing.network.jacobian import Block, FactorBlock, Inputs, Jacobian, OutputBlock, RowSizes
from lapwing.network.parameters import ParamLayout, owner
from lapwing.operators import (
    Arrangement,
    BlockDiagonalCurvature,
    Curvature,
    Damping,
    Eigen,
    ExactDamping,
    KroneckerCurvature,
    KroneckerFactors,
    SplitDamping,
)

_DAMPINGS: dict[str, Damping] = {"exact": ExactDamping(), "split": SplitDamping()}


@dataclass(frozen=True)
class Kron(Structure):
    """B ⊗ A per layer. Tensors without a Kronecker rule get their exact dense block, or their diagonal when large.

    `sharing`: how a layer's R positions enter ("expand" or "reduce"). `bias`: a column of the weight ("joint") or a
    block of its own ("separate"). `damping`: the prior enters exactly ("exact") or split over the two factors
    ("split").
    """

    sharing: str = "expand"
    bias: str = "joint"
    damping: str = "exact"
    adds_output = True
    additive = True
    resumable = True
    by_column = True
    whole_tensors = True
    takes_any_prior = False
    sketches = True

    def __post_init__(self) -> None:
        _check_word("sharing", self.sharing, ("expand", "reduce"))
        _check_word("bias", self.bias, ("joint", "separate"))
        _check_word("damping", self.damping, tuple(_DAMPINGS))

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return _LayerAccumulator(self, layout, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return sum(_factor_floats(layout, names) for names in layout.modules.values())

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored

    def stored_bytes(self, work: Workload) -> int:
        """Factors and diagonals, at the dtype they are stored in: float32 when large."""
        return work.n_parts * work.summary.stored_bytes

    def needed_bytes(self, work: Workload) -> int:
        """All that a posterior holds while it predicts, its copy of the network included."""
        summary, sum_of_parts = work.summary, work.summary.stored_bytes if work.n_parts > 1 else 0
        held = summary.posterior_bytes + work.n_parts * summary.gradient_bytes + self.stored_bytes(work)
        return held + sum_of_parts + summary.derived_bytes

    def sum_bytes(self, work: Workload) -> int:
        return work.n_parts * (work.summary.stored_bytes + work.summary.gradient_bytes)

    def decomposition_bytes(self, work: Workload) -> int:
        """All eigenvectors, and the workspace of the largest eigendecomposition."""
        return work.summary.derived_bytes

    def predicting_bytes(self, work: Workload, piece: int) -> int:
        derived = sum(block.derived_bytes for block in work.blocks)
        return derived + max(*(block.temporary_bytes for block in work.blocks), piece)

    def fit_macs(self, work: Workload) -> float:
        if not work.closed_output:
            return work.pass_macs + work.factor_macs
        (block,) = work.blocks
        return work.pass_macs + block.output_macs

    def coverage(self, work: Workload) -> str:
        return work.summary.treatments()


class _LayerAccumulator(Accumulator):
    """One accumulator per block of the Jacobian, created when the first rows show which blocks there are."""

    def __init__(self, structure: Kron, layout: ParamLayout, device: torch.device) -> None:
        self.structure, self.layout, self.device = structure, layout, device
        self.sums: list[_FactorAccumulator | _TensorAccumulator] = []

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for number, rows in enumerate(pieces):
            if not self.sums:
                self.sums = [self._sum_for(block) for block in rows.blocks]
            # All columns of the same data share their inputs: A once, B per column.
            self._add(rows, inputs_too=number == 0)
            del rows  # free before the next column: its gradients then reuse memory that is still in the cache

    def _add(self, rows: Jacobian, *, inputs_too: bool) -> None:
        for total, block in zip(self.sums, rows.blocks, strict=True):
            total.add(block, rows, inputs_too=inputs_too)

    def add_output(self, terms: OutputTerms) -> None:
        if not self.sums:
            self.sums = [self._sum_for(terms.block)]
        (total,) = self.sums
        assert isinstance(total, _FactorAccumulator)
        total.add_output(terms)

    def result(self) -> Curvature:
        # Blocks come in the order of the backward pass; the slices of a block-diagonal curvature are ascending.
        found = sorted((pair for total in self.sums for pair in total.result()), key=lambda pair: pair[0].start)
        return BlockDiagonalCurvature(tuple(s for s, _ in found), tuple(H for _, H in found))

    def state(self) -> State:
        return {"sums": [total.state() for total in self.sums]}

    def restore(self, state: State) -> None:
        self.sums = []
        for kept in state["sums"]:
            where = kept["where"]
            total = (
                self._factor_sum(where) if isinstance(where, Arrangement) else _TensorAccumulator(where, self.device)
            )
            total.restore(kept)
            self.sums.append(total)

    def _sum_for(self, block: Block) -> _FactorAccumulator | _TensorAccumulator:
        if isinstance(block, FactorBlock | OutputBlock):
            return self._factor_sum(block.arrangement)
        return _TensorAccumulator(block.slices[0], self.device)

    def _factor_sum(self, arrangement: Arrangement) -> _FactorAccumulator:
        start = arrangement.slices[0].start
        # The module's name, for error messages about its prior.
        name = next(n for n in self.layout.names if self.layout[n].start <= start < self.layout[n].stop)
        return _FactorAccumulator(self.structure, owner(name) or name, arrangement, self.device)


class _FactorAccumulator:
    """Running Σ a aᵀ (q, i, i), the number of positions in it, and Σ g gᵀ (q, o, o) of one layer."""

    def __init__(self, structure: Kron, name: str, arrangement: Arrangement, device: torch.device) -> None:
        self.structure, self.name, self.arrangement, self.device = structure, name, arrangement, device
        q, o, i = arrangement.q, arrangement.o, arrangement.i
        self.A, self.B = GramSum(q, i, device), GramSum(q, o, device)
        self.Lambda: OutputGram | None = None
        self.count = 0.0

    def add(self, block: Block, rows: Jacobian, *, inputs_too: bool) -> None:
        assert isinstance(block, FactorBlock)
        n, _, r = block.g.shape[:3]
        if inputs_too and r:
            self._add_inputs(block.inputs, n, r)
        if self.structure.sharing == "reduce":
            self.B.add(block.g.sum(2).flatten(0, 1))
        else:
            block.add_output_gram_(self.B)

    def add_output(self, terms: OutputTerms) -> None:
        # Each row of SᵀJ belongs to one likelihood term, i.e. one position, so "reduce" and "expand" agree for B.
        inputs = terms.block.inputs
        n, r = inputs.columns()[0].shape[:2]
        self._add_inputs(inputs, n, r)
        if self.Lambda is None:
            self.Lambda = OutputGram(self.arrangement.o, terms.block.device)
        self.Lambda.add(terms.output_curvature)

    def _add_inputs(self, inputs: Inputs, n: int, r: int) -> None:
        """Σ a aᵀ over data and positions ("expand"), or Σ ā āᵀ over data ("reduce")."""
        if self.structure.sharing == "reduce":
            self.A.add(inputs.tensor().mean(1))
            self.count += n
        else:
            inputs.add_gram_(self.A)
            self.count += n * r

    def state(self) -> State:
        sums = {"A": self.A.state(), "B": self.B.state(), "count": self.count}
        return {**sums, "where": self.arrangement, "Lambda": None if self.Lambda is None else self.Lambda.state()}

    def restore(self, state: State) -> None:
        self.A.restore(state["A"])
        self.B.restore(state["B"])
        self.count = state["count"]
        if state["Lambda"] is not None:
            self.Lambda = OutputGram(self.arrangement.o, self.device)
            self.Lambda.restore(state["Lambda"])

    def result(self) -> list[tuple[slice, Curvature]]:
        """(slice, B ⊗ A) for the layer; for weight and bias separately if the bias is a block of its own."""
        arrangement = self.arrangement
        A = self.A.result()
        if self.Lambda is None:
            B = self.B.result()
        elif self.B.empty:
            Lambda = self.Lambda.result()
            # The closed form is float64; large factors are stored in float32, like those of other layers.
            B = Lambda.to(stored_dtype(len(Lambda[0]), A.dtype))
        # The layer was used as the output layer for some of the data, and through the network for others.
        else:
            B = self.B.result().add_(self.Lambda.result())
        if self.structure.bias != "separate" or len(arrangement.slices) == 1:
            whole = slice(min(s.start for s in arrangement.slices), max(s.stop for s in arrangement.slices))
            return [(whole, self._curvature(arrangement, A, Eigen(B)))]
        assert arrangement.weight is not None and arrangement.bias is not None
        alone = replace(arrangement, bias=None), replace(arrangement, weight=None)
        ones = torch.full_like(A[:, :1, :1], self.count, dtype=torch.float64)  # the input of the bias is the constant 1
        outputs = Eigen(B)  # shared, so that it is decomposed once
        return [
            (arrangement.weight, self._curvature(alone[0], A[:, :-1, :-1], outputs)),
            (arrangement.bias, self._curvature(alone[1], ones, outputs)),
        ]

    def _curvature(self, arrangement: Arrangement, A: Float[Tensor, "q i i"], B: Eigen) -> Curvature:
        start = min(s.start for s in arrangement.slices)
        # A stays a sum here; KroneckerFactors divides by the count when it is used.
        factors = KroneckerFactors(A, max(self.count, 1.0), B)
        one = torch.ones((), dtype=torch.float64, device=A.device)
        damping = _DAMPINGS[self.structure.damping]
        return KroneckerCurvature(self.name, arrangement.shifted(-start), factors, one, damping)


class _TensorAccumulator:
    """Accumulator of a tensor without a Kronecker rule: its exact dense block if small, else its exact diagonal."""

    def __init__(self, where: slice, device: torch.device) -> None:
        size = where.stop - where.start
        self.where = where
        self.total: Accumulator = (
            DenseAccumulator(size, device)
            if size <= MAX_DENSE_BLOCK
            else DiagonalAccumulator(size, device, diagonal_dtype(size))
        )

    def add(self, block: Block, rows: Jacobian, *, inputs_too: bool) -> None:
        moved = block.shifted(-self.where.start)
        self.total.add([replace(rows, blocks=(moved,), p=self.where.stop - self.where.start)])

    def state(self) -> State:
        return {"where": self.where, "total": self.total.state()}

    def restore(self, state: State) -> None:
        self.total.restore(state["total"])

    def result(self) -> list[tuple[slice, Curvature]]:
        return [(self.where, self.total.result())]


def _factor_floats(layout: ParamLayout, names: tuple[str, ...]) -> int:
    """An upper bound from shapes alone: both factors of every matrix; the dense block or diagonal of other tensors."""
    total = 0
    for name in names:
        shape = layout.shape(name)
        size = layout[name].stop - layout[name].start
        if len(shape) >= 2:
            total += shape[0] ** 2 + (size // shape[0] + 1) ** 2
        else:
            total += size**2 if size <= MAX_DENSE_BLOCK else size
    return 2 * total  # factors and their eigenvectors


def _check_word(argument: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        listed = ", ".join(f'"{k}"' for k in known)
        raise InputError(f"Kron: {argument} is one of {listed}, got {word!r}.")
