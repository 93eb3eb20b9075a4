"""EKFAC: the Kronecker eigenbasis of each layer, with eigenvalues re-estimated in a second pass over the data.

s = Σ (U_Bᵀ (SᵀJ) U_A)² over the rows SᵀJ, each reshaped as a matrix (o, i). George et al. (2018).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lapwing._types import State
from lapwing.curvature.accumulator import Accumulator
from lapwing.curvature.kronecker import Kron
from lapwing.curvature.output_layer import OutputTerms
from lapwing.curvature.shards import decompose_together
from lapwing.curvature.structure import Structure
from lapwing.curvature.workload import Workload
from lapwing.errors import InputError, StructureError
from lapwing.network.jacobian import Jacobian
from lapwing.network.parameters import ParamLayout
from lapwing.operators import Basis, BlockDiagonalCurvature, Curvature, EigenCurvature, KroneckerCurvature


@dataclass(frozen=True)
class Ekfac(Kron):
    """The eigenbasis of `Kron`, with eigenvalues s = Σ (U_Bᵀ (SᵀJ) U_A)² from a second pass over the data.

    It needs all eigenvectors: factors are kept whole whatever their size.
    """

    large: int | None = None
    additive = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.large is not None:
            raise InputError("Ekfac: curvature along every eigenvector needs whole factors; large= is for lw.Kron.")

    def second_pass(self, parts: Sequence[Curvature]) -> Sequence[Accumulator] | None:
        bases = _shared_bases(parts)
        return [_EigenvalueAccumulator(part, bases) for part in parts if isinstance(part, BlockDiagonalCurvature)]

    def stored_floats(self, layout: ParamLayout) -> int:
        return super().stored_floats(layout) + layout.p

    def check_more_data(self) -> None:
        raise StructureError(
            "updated: two EKFAC curvatures have eigenbases of their own and do not add up exactly. "
            'Fit once on all the data, or use structure="kron".'
        )

    def stored_bytes(self, work: Workload) -> int:
        """One eigenbasis shared by all parts, and the eigenvalues of each part."""
        return self._summary(work).stored_bytes + 8 * work.n_parts * work.p

    @property
    def trial_structure(self) -> Structure:
        """Kronecker: a trial needs the size of the sums only, and skips the eigendecompositions."""
        return Kron(self.sharing, self.bias, self.damping, large=None)

    def second_pass_bytes(self, work: Workload) -> int:
        """Eigenvectors, and two copies of the eigenvalues of each part."""
        return 2 * self._summary(work).stored_bytes + 16 * work.n_parts * work.p

    def fit_macs(self, work: Workload) -> float:
        """Two passes: the Kronecker factors, then the rows rotated into the eigenbasis (twice the factors' cost)."""
        if not work.closed_output:
            through = work.columns * work.forward_macs if work.through_body else 0
            return work.pass_macs + 2 * work.factor_macs + work.forward_macs + through + work.dense_row_macs
        (block,) = work.blocks
        _, o, _ = block.maps or (0, 0, 0)
        return work.pass_macs + 2 * block.output_macs + block.r * o**2 + block.macs + work.forward_macs


class _EigenvalueAccumulator(Accumulator):
    """Running s = Σ (U_Bᵀ (SᵀJ) U_A)² per layer; blocks without an eigenbasis keep the result of the first pass."""

    def __init__(self, first: BlockDiagonalCurvature, bases: dict[int, Basis]) -> None:
        self.first, self.bases = first, bases
        self.s = {
            k: torch.zeros(H.p, dtype=torch.float64, device=basis.U_A.device)
            for k, basis in bases.items()
            for H in [first.blocks[k]]
        }

    def add(self, pieces: Iterable[Jacobian]) -> None:
        for rows in pieces:
            for k, basis in self.bases.items():
                self.s[k] += rows.columns(self.first.slices[k]).rotated(basis).sum_squares()

    def add_output(self, terms: OutputTerms) -> None:
        for k, basis in self.bases.items():
            self.s[k] += terms.axis_squares(self.first.slices[k], basis)

    def state(self) -> State:
        return {"s": list(self.s.values())}

    def restore(self, state: State) -> None:
        self.s = dict(zip(self.bases, state["s"], strict=True))

    def result(self) -> Curvature:
        blocks = list(self.first.blocks)
        for k, basis in self.bases.items():
            H = self.first.blocks[k]
            assert isinstance(H, KroneckerCurvature)
            shape = (len(basis.U_B), basis.U_B.shape[1], basis.U_A.shape[1])
            blocks[k] = EigenCurvature(H.name, H.arrangement, basis, self.s[k].reshape(shape))
        return BlockDiagonalCurvature(self.first.slices, tuple(blocks))


def _shared_bases(parts: Sequence[Curvature]) -> dict[int, Basis]:
    """Eigenbases of the sum of the parts. One basis for all parts keeps Σ_g c_g H_g diagonal in it for any c."""
    first, *rest = parts
    assert isinstance(first, BlockDiagonalCurvature)
    # Equal noise levels: they may still change, but the basis is computed once.
    ones = torch.ones(len(parts), dtype=torch.float64)
    whole = first.mixed(rest, ones) if rest else first  # type: ignore[arg-type]
    decompose_together(whole.blocks)
    return {k: H.factors.basis for k, H in enumerate(whole.blocks) if isinstance(H, KroneckerCurvature)}
