"""The columns of the output layer, whose output is the network's output: its gradient is the identity, kept implicit.

With f_tc = (W a_t)_c the row of output (t, c) is e_c a_tᵀ. In a Kronecker eigenbasis, W ↦ U_Bᵀ W U_A, it is u_c ã_tᵀ
with u_c row c of U_B, the same for all data. So only the inputs are stored, which all outputs share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.linalg import aligned_product
from lapwing.network.jacobian.block import Block
from lapwing.network.jacobian.factored import FactorBlock
from lapwing.network.jacobian.inputs import Given, Inputs
from lapwing.operators import Arrangement, GroupedDiagonal, axes

_FEW_OUTPUTS = 1024  # entries of the gradients up to which kernels use explicit gradients
_SQUARED_OUTPUTS = 128  # outputs whose squares are formed at a time
_PIECE_FLOATS = 1 << 20  # entries of intermediate products of covariances


@dataclass(frozen=True, eq=False)
class OutputBlock(Block):
    """Inputs a (n, r, i) of a single map; rows are in the order (position, output). U = None is the identity."""

    arrangement: Arrangement
    inputs: Inputs
    U: Float[Tensor, "c o"] | None = None

    @classmethod
    def given(cls, arrangement: Arrangement, a: Float[Tensor, "n r i"], U: Tensor | None = None) -> OutputBlock:
        return cls(arrangement, Given(a[:, :, None]), U)

    @cached_property
    def a(self) -> Float[Tensor, "n r i"]:
        return self.inputs.tensor()[:, :, 0]

    @property
    def device(self) -> torch.device:
        return self._bare.device

    @property
    def dtype(self) -> torch.dtype:
        return self._bare.dtype

    @property
    def c(self) -> int:
        return self._bare.shape[1] * self._c

    @property
    def slices(self) -> tuple[slice, ...]:
        return self.arrangement.slices

    @property
    def attached(self) -> bool:
        return self.inputs.attached

    @property
    def row_floats(self) -> int:
        """Inputs of a datum with their rotated and squared copies, divided among its rows."""
        return -(-4 * self.arrangement.i // self.arrangement.o)

    @property
    def contracted_floats(self) -> int:
        return self.row_floats + 2  # a weight per output, and the result

    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        return self.plain().parts()

    def entries(self, tensor: slice, at: Int[Tensor, " k"]) -> Float[Tensor, "n c k"]:
        _, o, i = self.arrangement.coordinates(tensor, at)
        U = torch.eye(self._c, dtype=self.dtype, device=self.device) if self.U is None else self.U
        return (self.a[:, :, None, i] * U[:, o]).flatten(1, 2)

    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        V = self.arrangement.matrices(v.to(self.dtype))[:, 0]
        changes = torch.einsum("nri,soi->snro", self.a, V)
        rotated = changes if self.U is None else changes @ self.U.T
        return rotated.flatten(2).double()

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        W = self._matrix(weights)
        c, start = self.a.shape[1] * self._c, 0
        cov = torch.empty(len(self.a), c, c, dtype=torch.float64, device=self.device)
        for a in self._pieces():
            cov[start : start + len(a)] = self._products(a, a, W).reshape(len(a), c, c)
            start += len(a)
        return cov

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        # Σ_oi u_co² w_oi a_ti²: two matrix products
        q = self.a.square() @ self._matrix(weights).T
        if self.U is None:
            return q.flatten(1).double()
        # Some outputs at a time, so that the squares stay in the processor's cache.
        return torch.cat([q @ some.square().T for some in self.U.split(_SQUARED_OUTPUTS)], dim=-1).flatten(1).double()

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        # With few outputs explicit gradients are small, and their Gram matrix is faster.
        if not isinstance(other, OutputBlock) or (
            self.a.shape[1] == 1 and self._c * self.arrangement.o <= _FEW_OUTPUTS
        ):
            return self.plain().cross(other, D)
        n, m = (len(block.a) * block.a.shape[1] for block in (self, other))
        exact, W = self.doubled(), self.arrangement.matrices(D.diagonal)[0]
        product = exact._products(exact.a.flatten(0, 1)[None], other.a.double().flatten(0, 1)[None], W)
        return product.reshape(n * self._c, m * other._c)

    def doubled(self) -> OutputBlock:
        return self._with(self.a.double())

    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]:
        inputs = self.a.double().square().sum((0, 1))
        outputs = inputs.new_ones(self.arrangement.o) if self.U is None else self.U.double().square().sum(0)
        return self.arrangement.flat_parts((outputs[:, None] * inputs)[None])

    def rotated(self, U_B: Float[Tensor, "q o s"], U_A: Float[Tensor, "q i r"]) -> OutputBlock:
        """The rows in a Kronecker eigenbasis: W ↦ U_Bᵀ W U_A, flattened as (q, o, i), or in the numbers of `axes`."""
        a, ones = self.inputs.columns()
        rows, shift = (U_A[0, :-1], U_A[0, -1]) if ones else (U_A[0], None)  # the bias input 1 adds the last row
        rotated = aligned_product(a.flatten(0, 2), rows, shift).unflatten(0, a.shape[:2])
        U = U_B[0] if self.U is None else self.U @ U_B[0]
        if not axes.whole(U_A):
            rotated = axes.completed(rotated[:, :, None], self.a[:, :, None], U_A)[:, :, 0]
        if not axes.whole(U_B):
            every = torch.eye(self.arrangement.o).to(U) if self.U is None else self.U
            U = axes.completed(U[:, None], every[:, None], U_B)[:, 0]
        return OutputBlock.given(Arrangement.plain(1, axes.width(U_B), axes.width(U_A)), rotated, U)

    def within(self, where: slice) -> Block | None:
        arrangement, columns = self.arrangement.within(where)
        if arrangement is None:
            return None
        every = arrangement.i == self.arrangement.i
        return replace(self if every else self._with(self.a[..., columns]), arrangement=arrangement)

    def shifted(self, offset: int) -> OutputBlock:
        return replace(self, arrangement=self.arrangement.shifted(offset))

    def concatenated(self, others: Sequence[Block]) -> Block:
        same = [block for block in others if isinstance(block, OutputBlock)]
        if len(same) < len(others):  # for some data the network's output was not this layer's
            return self.plain().concatenated(others)
        return self._with(torch.cat([self.a, *(block.a for block in same)]))

    def single_rows(self) -> Block:
        return self.plain().single_rows()

    def outputs_at(self, rows: Int[Tensor, " k"]) -> Block:
        position = int(rows[0]) // self._c if len(rows) else 0
        whole = torch.arange(position * self._c, (position + 1) * self._c, device=rows.device)
        if torch.equal(rows, whole):  # the outputs of one position
            return self._with(self.a[:, position : position + 1])
        return self.plain().outputs_at(rows)

    def fresh(self) -> OutputBlock:
        return replace(self, inputs=self.inputs.fresh())

    def formed(self) -> OutputBlock:
        return self._with(self.a)

    def data_at(self, data: slice) -> OutputBlock:
        return replace(self, inputs=self.inputs.at(data))

    def plain(self) -> FactorBlock:
        """The block with explicit gradients (r·c, r, 1, o), the same for all data."""
        n, r, _ = self.a.shape
        U = torch.eye(self._c, dtype=self.dtype, device=self.a.device) if self.U is None else self.U
        g = torch.einsum("ts,co->tcso", torch.eye(r, dtype=self.dtype, device=self.a.device), U)
        g = g.reshape(1, r * self._c, r, 1, -1).expand(n, -1, -1, -1, -1)
        return FactorBlock(self.arrangement, g, Given(self.a[:, :, None]))

    def _with(self, a: Float[Tensor, "n r i"]) -> OutputBlock:
        return OutputBlock.given(self.arrangement, a, self.U)

    @property
    def _bare(self) -> Float[Tensor, "n r 1 _"]:
        """The inputs as stored, with or without the column of ones: enough for shape, dtype and device."""
        return self.inputs.columns()[0]

    @property
    def _c(self) -> int:
        return self.arrangement.o if self.U is None else len(self.U)

    def _matrix(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "o i"]:
        return self.arrangement.matrices(weights.to(self.dtype))[0]

    def _pieces(self) -> Iterator[Float[Tensor, "k r i"]]:
        """The inputs in pieces whose intermediate products stay in the processor's cache."""
        r, o, i = self.a.shape[1], self.arrangement.o, self.arrangement.i
        return iter(self.a.split(max(1, _PIECE_FLOATS // (r * r * max(self._c * o, i)))))

    def _products(
        self, a: Float[Tensor, "n r i"], b: Float[Tensor, "n s i"], W: Float[Tensor, "o i"]
    ) -> Float[Tensor, "n r c s c"]:
        """Σ_o u_co u_do (Σ_i w_oi a_ti b_si)."""
        q = (a[:, :, None] * b[:, None]) @ W.T
        if self.U is None:
            return torch.diag_embed(q).transpose(2, 3)
        U = self.U.to(q.dtype)
        return ((q[..., None, :] * U) @ U.T).transpose(2, 3)
