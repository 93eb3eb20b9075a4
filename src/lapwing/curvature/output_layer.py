"""Curvature of the layer whose output is the network's, straight from the likelihood.

Its gradient is the identity, so a likelihood term with inputs a adds Λ ⊗ a aᵀ and nothing has to be pulled back:

    B = Σ Λ,      diag H = Σ Λ_cc a_i²,      along the axes of eigenbases  Σ (u_oᵀ Λ u_o) ã_i².
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
    """The likelihood terms of some data: the layer's inputs a (n, t, i) at each, and their Λ (n, t, c, c)."""

    block: OutputBlock
    output_curvature: OutputCurvature

    def squares(self) -> tuple[Float[Tensor, "m 1 o"], Float[Tensor, "m 1 _"], bool]:
        """Λ_cc and a_i² of every term, whose products add up to diag H; and whether the ones of a are left out."""
        a, ones = self.block.inputs.columns()
        diagonals = self.output_curvature.diagonals().flatten(0, 1).to(a.dtype)
        return diagonals[:, None], a.flatten(0, 1).square(), ones

    def axis_squares(self, where: slice, basis: Basis) -> Float[Tensor, " p"]:
        """The same along the axes of eigenbases of some of the layer's tensors, flattened as (o, i)."""
        part = self.block.within(where)
        assert isinstance(part, OutputBlock)
        U_A = basis.at(part.dtype)[1]
        a = (part.a @ U_A[0]).flatten(0, 1)
        along = self.output_curvature.along(basis.U_B[0]).flatten(0, 1)
        return (along.to(a.dtype).T @ a.square()).double().flatten()


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
        signed = [gram.result().mul_(sign) for sign, gram in self.grams.items()]
        B = signed[0] if signed else torch.zeros(1, self.c, self.c, dtype=torch.float64, device=self.device)
        for more in signed[1:]:
            B += more
        B[0].diagonal().copy_(self.diagonal)
        return B
