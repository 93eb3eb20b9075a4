"""Curvature of the network's output layer alone, in closed form from the likelihood.

The Jacobian of the outputs in the layer's output is the identity, so a likelihood term with layer input a contributes
Λ ⊗ a aᵀ, and no backward pass is needed:

    B = Σ Λ,      diag H = Σ Λ_cc a_i²,      eigenvalues in given eigenbases:  Σ (u_oᵀ Λ u_o) ã_i²,  ã = U_Aᵀ a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, State, Tensor
from lapwing.likelihoods import OutputCurvature
from lapwing.linalg import GramSum
from lapwing.network.jacobian import OutputBlock
from lapwing.operators import Basis


@dataclass(frozen=True, eq=False)
class OutputTerms:
    """The likelihood terms of some data: the layer's inputs a (n, t, i) and Λ (n, t, c, c)."""

    block: OutputBlock
    output_curvature: OutputCurvature

    def squares(self) -> tuple[Float[Tensor, "m 1 o"], Float[Tensor, "m 1 _"], bool]:
        """Λ_cc and a_i² of every term: diag H is the sum of their products.

        Third: whether a lacks its column of ones.
        """
        a, ones = self.block.inputs.columns()
        diagonals = self.output_curvature.diagonals().flatten(0, 1).to(a.dtype)
        return diagonals[:, None], a.flatten(0, 1).square(), ones

    def axis_squares(self, where: slice, basis: Basis) -> Float[Tensor, " p"]:
        """Σ (u_oᵀ Λ u_o) ã_i² in the eigenbases of the tensors at `where`, flattened as (o, i)."""
        part = self.block.within(where)
        assert isinstance(part, OutputBlock)
        U_A = basis.at(part.dtype)[1]
        a = (part.a @ U_A[0]).flatten(0, 1)
        along = self.output_curvature.along(basis.U_B[0]).flatten(0, 1)
        return (along.to(a.dtype).T @ a.square()).double().flatten()


class OutputGram:
    """Running Σ Λ (1, c, c) over likelihood terms.

    Diagonals are summed separately, in float64: a Softmax Λ = diag(p) − p pᵀ would lose them to cancellation.
    """

    def __init__(self, c: int, device: torch.device) -> None:
        self.c, self.device = c, device
        self.diagonal = torch.zeros(c, dtype=torch.float64, device=device)
        self.grams: dict[float, GramSum] = {}  # key: the sign with which rows enter

    def add(self, output_curvature: OutputCurvature) -> None:
        """Add Σ Λ over the terms of a piece: diagonals, and rows v of the off-diagonal ± v vᵀ."""
        self.diagonal += output_curvature.diagonals().reshape(-1, self.c).double().sum(0)
        rows = output_curvature.rows()
        if len(rows):
            # Positive and negative rows have separate Gram sums, since a Gram matrix has one sign.
            if output_curvature.sign not in self.grams:
                self.grams[output_curvature.sign] = GramSum(1, self.c, self.device, exact=True)
            self.grams[output_curvature.sign].add(rows[:, None])

    def state(self) -> State:
        grams = [{"sign": sign, "gram": gram.state()} for sign, gram in self.grams.items()]
        return {"diagonal": self.diagonal, "grams": grams}

    def restore(self, state: State) -> None:
        self.diagonal, self.grams = state["diagonal"], {}
        for kept in state["grams"]:
            self.grams[kept["sign"]] = GramSum(1, self.c, self.device, exact=True)
            self.grams[kept["sign"]].restore(kept["gram"])

    def result(self) -> Float[Tensor, "1 c c"]:
        """Σ Λ (1, c, c), with the separately summed diagonal."""
        signed = [gram.result().mul_(sign) for sign, gram in self.grams.items()]
        B = signed[0] if signed else torch.zeros(1, self.c, self.c, dtype=torch.float64, device=self.device)
        for more in signed[1:]:
            B += more
        # Replace the diagonal of the rows' Gram matrix by the one summed separately.
        B[0].diagonal().copy_(self.diagonal)
        return B
