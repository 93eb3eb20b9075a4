"""Curvature of the layer whose output is the network's, straight from the likelihood.

Its gradient is the identity, so a likelihood term with inputs a adds Λ ⊗ a aᵀ and nothing has to be pulled back:

    B = Σ Λ,      diag H = Σ Λ_cc a_i²,      along the axes of eigenbases  Σ (u_oᵀ Λ u_o) ã_i².
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.jacobian import OutputBlock
from lapwing.likelihoods import OutputCurvature
from lapwing.linalg import GramSum
from lapwing.operators import Basis


@dataclass(frozen=True, eq=False)
class OutputTerms:
    """The likelihood terms of some data: the layer's inputs a (n, t, i) at each, and their Λ (n, t, c, c)."""

    block: OutputBlock
    output_curvature: OutputCurvature

    def sum_squares(self, p: int) -> Float[Tensor, " p"]:
        """diag Σ Λ ⊗ a aᵀ."""
        squares = self._weighted(self.output_curvature.diagonals(), self.block.a)
        return self.block.arrangement.flat(squares[None], p)

    def axis_squares(self, where: slice, basis: Basis) -> Float[Tensor, " p"]:
        """The same along the axes of eigenbases of some of the layer's tensors, flattened as (o, i)."""
        part = self.block.within(where)
        assert isinstance(part, OutputBlock)
        U_A = basis.at(part.dtype)[1]
        return self._weighted(self.output_curvature.along(basis.U_B[0]), part.a @ U_A[0]).flatten()

    def _weighted(self, weights: Float[Tensor, "n t o"], a: Float[Tensor, "n t i"]) -> Float[Tensor, "o i"]:
        """Σ λ_o a_i² over terms: one product of matrices."""
        return (weights.flatten(0, 1).to(a.dtype).T @ a.flatten(0, 1).square()).double()


class OutputGram:
    """A running Σ Λ over likelihood terms. Diagonals are summed apart: they are what must not cancel."""

    def __init__(self, c: int, device: torch.device) -> None:
        self.c, self.device = c, device
        self.diagonal = torch.zeros(c, dtype=torch.float64, device=device)
        self.grams: dict[float, GramSum] = {}

    def add(self, output_curvature: OutputCurvature) -> None:
        self.diagonal += output_curvature.diagonals().reshape(-1, self.c).double().sum(0)
        rows = output_curvature.rows()
        if len(rows):
            if output_curvature.sign not in self.grams:
                self.grams[output_curvature.sign] = GramSum(1, self.c, self.device)
            self.grams[output_curvature.sign].add(rows[:, None])

    def result(self) -> Float[Tensor, "1 c c"]:
        B = torch.zeros(1, self.c, self.c, dtype=torch.float64, device=self.device)
        for sign, gram in self.grams.items():
            B += sign * gram.result()
        B[0].diagonal().copy_(self.diagonal)
        return B
