"""Kronecker-factored curvature (K-FAC) from captured layer inputs a and output gradients g: H_layer ≈ B ⊗ A.

expand: A = 1/(N R) Σ_nt a aᵀ, B = Σ_nt g gᵀ.   reduce: with ā = mean_t a and ĝ = Σ_t g, A = 1/N Σ ā āᵀ, B = Σ ĝ ĝᵀ.
(Martens and Grosse, 2015; Eschenhagen et al., 2023.) Sums are stored and the mean of A is taken at the end, so the
result does not depend on the batches. A factor that is large beside its layer, as those of adapters are, is a sketch
instead of a matrix, from which its leading directions come (`linalg.sketch`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from lapwing._types import State, Tensor
from lapwing.curvature.accumulator import Accumulator
from lapwing.curvature.diagonal import DiagonalAccumulator
from lapwing.curvature.full import DenseAccumulator
from lapwing.curvature.model_summary import MAX_DENSE_BLOCK, ModelSummary, diagonal_dtype
from lapwing.curvature.output_layer import OutputGram, OutputTerms
from lapwing.curvature.structure import Structure
from lapwing.curvature.workload import Workload
from lapwing.errors import InputError
from lapwing.linalg import GramSketch, GramSum, Sketch, stored_dtype
from lapwing.network.jacobian import Block, FactorBlock, Inputs, Jacobian, OutputBlock, RowSizes
from lapwing.network.parameters import ParamLayout, owner
from lapwing.operators import (
    WHOLE,
    Arrangement,
    BlockDiagonalCurvature,
    Curvature,
    Damping,
    Eigen,
    ExactDamping,
    Factor,
    KroneckerCurvature,
    KroneckerFactors,
    Leading,
    LeadingEigen,
    SplitDamping,
    combined,
)

_DAMPINGS: dict[str, Damping] = {"exact": ExactDamping(), "split": SplitDamping()}


@dataclass(frozen=True)
class Kron(Structure):
    """B ⊗ A per layer. Tensors without a Kronecker rule get their exact dense block, or their diagonal when large.

    `sharing`: how a layer's R positions enter ("expand" or "reduce"). `bias`: a column of the weight ("joint") or a
    block of its own ("separate"). `damping`: the prior enters exactly ("exact") or split over the two factors
    ("split"). A factor with a side above `large`, 16 times that of the other factor or more, is kept as its leading
    directions and a multiple of the identity: as many as hold `energy` of its trace, at most `rank`. The trace is
    exact. `large=None` keeps every factor whole.
    """

    sharing: str = "expand"
    bias: str = "joint"
    damping: str = "exact"
    large: int | None = 2048
    energy: float = 0.999
    rank: int = 1024
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
        for name, count in (("large", self.large), ("rank", self.rank)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise InputError(f"Kron: {name} is a positive whole number, got {count!r}.")
        if not 0 < self.energy <= 1:
            raise InputError(f"Kron: energy is a share of the trace, above 0 and at most 1, got {self.energy!r}.")

    @property
    def leading(self) -> Leading:
        """Which factors are kept as leading directions."""
        return Leading(self.large, self.energy, self.rank)

    def _summary(self, work: Workload) -> ModelSummary:
        """The parameter blocks as this structure keeps them; the closed form of the output layer is kept whole."""
        return work.summary.under(WHOLE if work.closed_output else self.leading)

    def accumulator(self, layout: ParamLayout, device: torch.device) -> Accumulator:
        return _LayerAccumulator(self, layout, device)

    def stored_floats(self, layout: ParamLayout) -> int:
        return sum(_factor_floats(layout, names, self.leading) for names in layout.modules.values())

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored

    def stored_bytes(self, work: Workload) -> int:
        """Factors and diagonals, at the dtype they are stored in: float32 when large."""
        return work.n_parts * self._summary(work).stored_bytes

    def needed_bytes(self, work: Workload) -> int:
        """All that a posterior holds while it predicts, its copy of the network included."""
        summary = self._summary(work)
        sum_of_parts = summary.stored_bytes if work.n_parts > 1 else 0
        held = summary.posterior_bytes + work.n_parts * summary.gradient_bytes + self.stored_bytes(work)
        return held + sum_of_parts + summary.derived_bytes

    def sum_bytes(self, work: Workload) -> int:
        return work.n_parts * (self._summary(work).stored_bytes + work.summary.gradient_bytes)

    def decomposition_bytes(self, work: Workload) -> int:
        """All eigenvectors, and the workspace of the largest eigendecomposition."""
        return self._summary(work).derived_bytes

    def predicting_bytes(self, work: Workload, piece: int) -> int:
        blocks = self._summary(work).blocks
        derived = sum(block.derived_bytes for block in blocks)
        return derived + max(*(block.temporary_bytes for block in blocks), piece)

    def fit_macs(self, work: Workload) -> float:
        if not work.closed_output:
            blocks = self._summary(work).blocks
            return work.pass_macs + sum(block.factor_macs(work.columns) for block in blocks)
        (block,) = work.blocks
        return work.pass_macs + block.output_macs

    def cubes(self, work: Workload) -> int:
        """Cost of the eigendecompositions, up to a constant: the sum of side³ over the factors."""
        return self._summary(work).cubes

    def coverage(self, work: Workload) -> str:
        return self._summary(work).treatments()


class _LayerAccumulator(Accumulator):
    """One accumulator per block of the Jacobian, created when the first rows show which blocks there are."""

    def __init__(self, structure: Kron, layout: ParamLayout, device: torch.device) -> None:
        self.structure, self.layout, self.device = structure, layout, device
        self.sums: list[_FactorAccumulator | _TensorAccumulator] = []
        self.omegas: dict[object, Tensor] = {}  # test matrices of sketches, shared by layers of equal size

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
            self.sums = [self._factor_sum(terms.block.arrangement, WHOLE)]
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
                self._factor_sum(where, kept["leading"])
                if isinstance(where, Arrangement)
                else _TensorAccumulator(where, self.device)
            )
            total.restore(kept)
            self.sums.append(total)

    def _sum_for(self, block: Block) -> _FactorAccumulator | _TensorAccumulator:
        if isinstance(block, FactorBlock | OutputBlock):
            return self._factor_sum(block.arrangement, self.structure.leading)
        return _TensorAccumulator(block.slices[0], self.device)

    def _factor_sum(self, arrangement: Arrangement, leading: Leading) -> _FactorAccumulator:
        start = arrangement.slices[0].start
        # The module's name, for error messages about its prior.
        name = next(n for n in self.layout.names if self.layout[n].start <= start < self.layout[n].stop)
        name = owner(name) or name
        return _FactorAccumulator(self.structure, name, arrangement, leading, self.device, self.omegas)


class _FactorAccumulator:
    """Running Σ a aᵀ (q, i, i), the number of positions in it, and Σ g gᵀ (q, o, o) of one layer, or their sketches."""

    def __init__(
        self,
        structure: Kron,
        name: str,
        arrangement: Arrangement,
        leading: Leading,
        device: torch.device,
        omegas: dict[object, Tensor],
    ) -> None:
        self.structure, self.name, self.arrangement, self.leading = structure, name, arrangement, leading
        self.device, q, o, i = device, arrangement.q, arrangement.o, arrangement.i
        self.separate = structure.bias == "separate" and len(arrangement.slices) > 1
        rank_A, rank_B = leading.directions(i, o), leading.directions(o, i)
        # No part can be cut out of a sketch later: that of a weight alone leaves out the bias input from the start.
        self.weight_alone = self.separate and rank_A is not None
        self.A = GramSum(q, i, device) if rank_A is None else GramSketch(q, i - self.separate, rank_A, device, omegas)
        self.B = GramSum(q, o, device) if rank_B is None else GramSketch(q, o, rank_B, device, omegas)
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
        inputs = inputs.without_bias() if self.weight_alone else inputs
        if self.structure.sharing == "reduce":
            self.A.add(inputs.tensor().mean(1))
            self.count += n
        else:
            inputs.add_gram_(self.A)
            self.count += n * r

    def state(self) -> State:
        sums = {"A": self.A.state(), "B": self.B.state(), "count": self.count, "leading": self.leading}
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
        arrangement, A = self.arrangement, self._inputs()
        B = self._outputs(A.dtype)  # shared by weight and bias, so that it is decomposed once
        if not self.separate:
            whole = slice(min(s.start for s in arrangement.slices), max(s.stop for s in arrangement.slices))
            return [(whole, self._curvature(arrangement, A, B))]
        assert arrangement.weight is not None and arrangement.bias is not None
        alone = replace(arrangement, bias=None), replace(arrangement, weight=None)
        if isinstance(A, Eigen):
            A = Eigen(A.total[:, :-1, :-1], A.count)
        # The input of the bias is the constant 1.
        ones = torch.full((arrangement.q, 1, 1), self.count, dtype=torch.float64, device=self.device)
        return [
            (arrangement.weight, self._curvature(alone[0], A, B)),
            (arrangement.bias, self._curvature(alone[1], Eigen(ones, A.count), B)),
        ]

    def _inputs(self) -> Factor:
        # The sum stays a sum here; it is divided by the count when it is used.
        A, count = self.A.result(), max(self.count, 1.0)
        return LeadingEigen(A, self.leading, count) if isinstance(A, Sketch) else Eigen(A, count)

    def _outputs(self, dtype: torch.dtype) -> Factor:
        if self.Lambda is not None and self.B.empty:
            Lambda = self.Lambda.result()
            # The closed form is float64; large factors are stored in float32, like those of other layers.
            return Eigen(Lambda.to(stored_dtype(len(Lambda[0]), dtype)))
        B = self.B.result()
        factor = LeadingEigen(B, self.leading) if isinstance(B, Sketch) else Eigen(B)
        if self.Lambda is None:
            return factor
        # The layer was used as the output layer for some of the data, and through the network for others.
        return combined([factor, Eigen(self.Lambda.result().to(factor.dtype))], [1.0, 1.0], 1.0)

    def _curvature(self, arrangement: Arrangement, A: Factor, B: Factor) -> Curvature:
        start = min(s.start for s in arrangement.slices)
        factors = KroneckerFactors(A, A.count, B)
        one = torch.ones((), dtype=torch.float64, device=self.device)
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


def _factor_floats(layout: ParamLayout, names: tuple[str, ...], leading: Leading) -> int:
    """An upper bound from shapes alone: both factors of every matrix; the dense block or diagonal of other tensors."""
    total = 0
    for name in names:
        shape = layout.shape(name)
        size = layout[name].stop - layout[name].start
        if len(shape) >= 2:
            o, i = shape[0], size // shape[0] + 1
            total += o * (leading.directions(o, i) or o) + i * (leading.directions(i, o) or i)
        else:
            total += size**2 if size <= MAX_DENSE_BLOCK else size
    return 2 * total  # factors and their eigenvectors


def _check_word(argument: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        listed = ", ".join(f'"{k}"' for k in known)
        raise InputError(f"Kron: {argument} is one of {listed}, got {word!r}.")
