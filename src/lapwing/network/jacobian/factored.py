"""The columns of a layer that computes s_t = W a_t at positions t: ∂f_c/∂W = Σ_t g_ct a_tᵀ with g = ∂f_c/∂s_t.

Only the factors (a, g) are stored. Contractions use them directly; no array of size n · c · P is formed. The bias is a
column of W whose input is 1. Factors have the model's dtype; contractions return float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.linalg import RowSum, joined
from lapwing.network.jacobian.block import Block, contracted, padded, picked, summed
from lapwing.network.jacobian.dense import DenseBlock
from lapwing.network.jacobian.inputs import Given, Inputs
from lapwing.operators import Arrangement, Basis, GroupedDiagonal, axes

_CACHED_FLOATS = 1 << 18  # entries of intermediate results that stay in the processor's cache
_PATCHED_FLOATS = 1 << 20  # entries of inputs formed at a time while dense rows are computed


@dataclass(frozen=True, eq=False)
class FactorBlock(Block):
    """A layer's columns as factors: inputs a (n, r, q, i) and output gradients g (n, c, r, q, o) of q parallel maps."""

    arrangement: Arrangement
    g: Float[Tensor, "n c r q o"]
    inputs: Inputs

    @cached_property
    def a(self) -> Float[Tensor, "n r q i"]:
        return self.inputs.tensor()

    @property
    def device(self) -> torch.device:
        return self.g.device

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    @property
    def attached(self) -> bool:
        return self.g.requires_grad or self.inputs.attached

    @property
    def c(self) -> int:
        return self.g.shape[1]

    @property
    def slices(self) -> tuple[slice, ...]:
        return self.arrangement.slices

    @property
    def row_floats(self) -> int:
        return prod(self.g.shape[2:])

    @property
    def contracted_floats(self) -> int:
        _, c, r, q, o = self.g.shape
        rotated = r * q * (self.arrangement.i + c * o)
        return rotated if self.one_position else rotated + c * q * o * self.arrangement.i  # Σ_t g_t a_tᵀ

    @property
    def one_position(self) -> bool:
        return self.g.shape[2] == 1

    def matrices(self) -> Float[Tensor, "n c q o i"]:
        """The dense rows Σ_t g_t a_tᵀ as matrices, in the model's dtype."""
        n, c, r, q, o = self.g.shape
        if self.arrangement.weight is None:  # only the bias is inferred: its input is 1
            return self.g.sum(2)[..., None]
        g = self.g.permute(0, 3, 1, 4, 2).reshape(n, q, c * o, r)
        products = g @ self.a.permute(0, 2, 1, 3)
        return products.reshape(n, q, c, o, -1).transpose(1, 2)

    def add_output_gram_(self, total: RowSum) -> None:
        """total ← total + Σ g gᵀ over data, outputs and positions, without a copy, whatever the memory layout."""
        if self.positions_last:
            total.add_transposed(self.g[:, :, :, 0].flatten(0, 1).mT)
        else:
            g = self.g if self.g.stride(1) >= self.g.stride(2) else self.g.transpose(1, 2)
            total.add(g.flatten(0, 2))

    @property
    def positions_last(self) -> bool:
        """Whether positions, not outputs, are contiguous in memory (images in channels-first format); one map only."""
        return self.g.shape[3] == 1 and self.g.shape[2] > 1 and self.g.stride(2) == 1 and self.g.stride(4) != 1

    def parts(self) -> tuple[Float[Tensor, "n c _"], ...]:
        return self.arrangement.flat_parts(self.doubled().matrices())

    def entries(self, tensor: slice, at: Int[Tensor, " k"]) -> Float[Tensor, "n c k"]:
        # ∂f_c/∂W_oi = Σ_t g_cto a_ti
        q, o, i = self.arrangement.coordinates(tensor, at)
        if tensor == self.arrangement.bias:
            return self.g[..., q, o].sum(2)
        a = self.inputs.tensor()  # not the cached `self.a`: a convolution's patches are large, and used once here
        if self.one_position:
            return self.g[:, :, 0, q, o] * a[:, 0, q, i][:, None]
        columns = self.g.new_empty(*self.g.shape[:2], len(at))
        row = q * self.arrangement.o + o
        for one in row.unique().tolist():  # the columns of one output are a single matrix product
            some = (row == one).nonzero()[:, 0]
            first = some[0]
            columns[..., some] = self.g[..., q[first], o[first]] @ a[:, :, q[first], i[some]]
        return columns

    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        # Σ_t g_tᵀ V a_t: the change V a_t of the layer's outputs, then the change of f
        V = self.arrangement.matrices(v.to(self.g.dtype))
        c, r = self.g.shape[1:3]
        if c * (r + len(V)) < r * len(V):  # Σ_t g_t a_tᵀ costs less than the layer's outputs for every vector
            return self._mv_by_products(V)
        changes = torch.einsum("nrqi,sqoi->snrqo", self.a, V)
        return torch.einsum("ncrqo,snrqo->snc", self.g, changes).double()

    def _mv_by_products(self, V: Float[Tensor, "s q o i"]) -> Float[Tensor, "s n c"]:
        found = [
            summed(tile.matrices().flatten(2) @ V[:, :, outputs].flatten(1).T for outputs, tile in tiles)
            for tiles in self._tiles()
        ]
        together = joined(found) if found else V.new_zeros(0, self.c, len(V))
        return together.permute(2, 0, 1).double()

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        W = self.arrangement.matrices(weights).to(self.g.dtype)
        if self.one_position:
            # Σ_oi g_co g_do a_i² w_oi = Σ_o g_co g_do (W a²)_o
            g = self.g[:, :, 0].flatten(2)
            return ((g * self._squared_inputs_through(W)[:, None]) @ g.mT).double()
        root, found = W.sqrt(), []
        for tiles in self._tiles():
            total = None
            for outputs, tile in tiles:
                M = tile.matrices()
                # In place where possible: M is a new tensor, and large.
                M = M * root[:, outputs] if root.requires_grad else M.mul_(root[:, outputs])
                product = M.flatten(2) @ M.flatten(2).mT
                total = product if total is None else total.add_(product)
            assert total is not None
            found.append(total)
        return joined(found).double() if found else self.g.new_zeros(0, self.c, self.c).double()

    def quads(self, weights: Float[Tensor, "s p"]) -> Float[Tensor, "s n c c"]:
        if self.one_position:
            return super().quads(weights)
        W = self.arrangement.matrices(weights).to(self.g.dtype)
        found = [
            summed(contracted(tile.matrices().flatten(2), W[:, :, outputs].flatten(1)) for outputs, tile in tiles)
            for tiles in self._tiles()  # Σ_t g_t a_tᵀ once for all weights
        ]
        together = torch.cat(found, 1) if found else W.new_zeros(len(W), 0, self.c, self.c)
        return together.double()

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        W = self.arrangement.matrices(weights).to(self.g.dtype)
        if self.one_position:
            return (self.g[:, :, 0].flatten(2) ** 2 @ self._squared_inputs_through(W)[:, :, None])[..., 0].double()
        return (self.matrices().flatten(2) ** 2 @ W.flatten()).double()

    def has_factored_cross(self, other: Block, D: GroupedDiagonal) -> bool:
        other = other.plain()
        single = isinstance(other, FactorBlock) and self._single and other._single
        return single and self.arrangement.input_scales(D) is not None

    def dense_rows(self) -> Float[Tensor, "nc k"]:
        """In the order (q, o, i) of `matrices`."""
        n, c, r = self.g.shape[:3]
        return dense_factored_rows(self, n, c, r, self.arrangement)

    def write_(self, out: Float[Tensor, "nc k"]) -> None:
        """out ← Σ_t g_t a_tᵀ."""
        n, c, r, _, o = self.g.shape
        g = self.g[:, :, :, 0].permute(0, 1, 3, 2).reshape(n, c * o, r)
        torch.bmm(g, self.inputs.tensor()[:, :, 0], out=out.view(n, c * o, -1))

    def in_fastest_order(self) -> FactorBlock:
        return replace(self, inputs=self.inputs.in_fastest_order())

    def entered(self) -> Block:
        return self if self.arrangement.joined is None else self._entered()

    def ordered_weights(self, D: GroupedDiagonal) -> Float[Tensor, " k"]:
        return self.arrangement.matrices(D.diagonal).flatten()

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        scales, other = self.arrangement.input_scales(D), other.plain()
        if not isinstance(other, FactorBlock) or not (self._single and other._single) or scales is None:
            dense = zip(self.slices, self.parts(), other.parts(), strict=True)
            return summed((J.flatten(0, 1) * D.diagonal[s]) @ K.flatten(0, 1).T for s, J, K in dense)
        # One position, so ⟨g aᵀ, g' a'ᵀ⟩_D = (g·g')(Σ_i d_i a_i a'_i): two small Gram matrices instead of dense rows
        inputs = self.input_products(other, D)
        outputs = self.g[:, :, 0, 0].flatten(0, 1).double() @ other.g[:, :, 0, 0].flatten(0, 1).double().T
        if self.g.shape[1] == other.g.shape[1] == 1:
            return outputs * inputs
        shape = (self.g.shape[0], self.g.shape[1], other.g.shape[0], other.g.shape[1])
        return (outputs.view(shape) * inputs[:, None, :, None]).view_as(outputs)

    def input_products(self, other: FactorBlock, D: GroupedDiagonal) -> Float[Tensor, "n m"]:
        """Σ_i d_i a_i a'_i for layers with one position; D must be constant on the weight and on the bias."""
        scales = self.arrangement.input_scales(D)
        assert scales is not None
        a = self.a[:, 0, 0].double()
        return (a * scales) @ (a if other is self else other.a[:, 0, 0].double()).T

    def doubled(self) -> FactorBlock:
        return replace(self, g=self.g.double(), inputs=Given(self.a.double()))

    def sum_squares(self) -> tuple[Float[Tensor, " _"], ...]:
        if self.one_position:
            squares = torch.einsum("nqo,nqi->qoi", (self.g[:, :, 0] ** 2).sum(1), self.a[:, 0] ** 2)
            return self.arrangement.flat_parts(squares.double())
        return self.arrangement.flat_parts(self.squared_products().double())

    def squared_products(self) -> Float[Tensor, "q o i"]:
        """Σ_nc (Σ_t g_t a_tᵀ)² elementwise, in float32 or better. Positions are summed before squaring.

        Weight and bias (a_t = 1) are computed separately: matrix products with an even number of columns are faster.
        """
        dtype = torch.promote_types(self.dtype, torch.float32)
        parts = []
        if self.arrangement.weight is not None:
            parts.append(self._squared_products_of_weight(dtype))
        if self.arrangement.bias is not None:
            parts.append(self.g.sum(2).to(dtype).square().sum((0, 1))[..., None])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def totals(self) -> tuple[Float[Tensor, " _"], ...]:
        """Σ over data and outputs of the rows, in the model's dtype, one tensor per slice."""
        g = self.g[:, 0] if self.g.shape[1] == 1 else self.g.sum(1)
        return self.arrangement.flat_parts(torch.einsum("nrqo,nrqi->qoi", g, self.a))

    def rotated(self, U_B: Float[Tensor, "q o s"], U_A: Float[Tensor, "q i r"]) -> Block:
        """The rows in a Kronecker eigenbasis: W ↦ U_Bᵀ W U_A, flattened as (q, o, i), or in the numbers of `axes`."""
        q, o, i = len(U_B), axes.width(U_B), axes.width(U_A)
        c, r = self.g.shape[1:3]
        # Rotating the factors costs r (i² + c o²) per datum, rotating the dense rows c (o² i + o i²).
        if not self.one_position and c * (o * o * i + o * i * i) < r * (i * i + c * o * o):
            rotated = Basis(U_A, U_B).rotate(self.matrices())
            return DenseBlock(slice(0, q * o * i), rotated.flatten(2))
        g = self.g.transpose(1, 2)
        g = axes.completed(torch.einsum("nrcqo,qop->nrcqp", g, U_B), g, U_B).transpose(1, 2)
        a = self.inputs.rotated(U_A)
        a = a if axes.whole(U_A) else axes.completed(a, self.a, U_A)
        return FactorBlock(Arrangement.plain(q, o, i), g, Given(a))

    def within(self, where: slice) -> Block | None:
        arrangement, _ = self.arrangement.within(where)
        if arrangement is None or arrangement is self.arrangement:
            return None if arrangement is None else self
        if arrangement.weight is None:
            n, _, r, q, _ = self.g.shape
            return replace(self, arrangement=arrangement, inputs=Given(self.g.new_ones(1, 1, 1, 1).expand(n, r, q, 1)))
        return replace(self, arrangement=arrangement, inputs=self.inputs.without_bias())

    def fresh(self) -> FactorBlock:
        return replace(self, inputs=self.inputs.fresh())

    def kept(self) -> Block:
        """The dense columns if they are smaller than the factors, as for a small kernel at many positions."""
        _, c, r, q, o = self.g.shape
        fewer = c * q * o * self.arrangement.i < r * q * (c * o + self.arrangement.i)
        if fewer and self.arrangement.joined is not None:
            return self._entered()
        inputs = self.inputs.kept()
        return self if inputs is self.inputs else replace(self, inputs=inputs)

    def formed(self) -> FactorBlock:
        return replace(self, inputs=self.inputs.kept())

    def _entered(self) -> DenseBlock:
        assert self.arrangement.joined is not None
        return DenseBlock(self.arrangement.joined, torch.cat(self.arrangement.flat_parts(self.matrices()), -1))

    def shifted(self, offset: int) -> FactorBlock:
        return replace(self, arrangement=self.arrangement.shifted(offset))

    def concatenated(self, others: Sequence[Block]) -> Block:
        if any(isinstance(other, DenseBlock) for other in others):  # `kept` chose dense columns for some data
            return self._entered().concatenated(others)
        blocks = [self, *(block for other in others if isinstance(block := other.plain(), FactorBlock))]
        r = max(block.g.shape[2] for block in blocks)  # pad shorter sequences with positions of zero gradient
        g = torch.cat([padded(block.g, r, 2) for block in blocks])
        return replace(self, g=g, inputs=self.inputs.concatenated([block.inputs for block in blocks[1:]], r))

    def single_rows(self) -> FactorBlock:
        c = self.g.shape[1]
        return replace(self, g=self.g.flatten(0, 1)[:, None], inputs=Given(self.a.repeat_interleave(c, 0)))

    def outputs_at(self, rows: Int[Tensor, " k"]) -> FactorBlock:
        return replace(self, g=picked(self.g, rows), inputs=self._shared)

    @cached_property
    def _shared(self) -> Inputs:
        """Inputs shared by all outputs: computed once, unless they are the patches of many positions."""
        return Given(self.a) if self.one_position else self.inputs

    def data_at(self, data: slice) -> FactorBlock:
        formed = "a" in vars(self)  # the cached_property has been computed: reuse it
        return replace(self, g=self.g[data], inputs=Given(self.a[data]) if formed else self.inputs.at(data))

    def split(self, n: int, step: int) -> list[Block]:
        if not self.attached:
            return super().split(n, step)
        # By `split`: the backward pass of each slice would allocate a gradient of the full size.
        pieces = zip(self.g.split(step), self.inputs.split(n, step), strict=True)
        return [replace(self, g=g, inputs=inputs) for g, inputs in pieces]

    def _squared_products_of_weight(self, dtype: torch.dtype) -> Float[Tensor, "q o i"]:
        """A few data and outputs at a time in one buffer, so that intermediate results stay in the cache."""
        n, c, r, q, o = self.g.shape
        inputs = (self.inputs if self.arrangement.bias is None else self.inputs.without_bias()).in_fastest_order()
        i = replace(self.arrangement, bias=None).i
        total = torch.zeros(q, o, i, dtype=dtype, device=self.device)
        width = max(1, min(o, _CACHED_FLOATS // max(1, i)))
        step = max(1, _CACHED_FLOATS // max(1, q * (width * i + r * (c * o + i))))
        buffer = total.new_empty(min(n, step), width * i)
        for start in range(0, n, step):
            data = slice(start, start + step)
            a, g = inputs.at(data).tensor().to(dtype), self.g[data].to(dtype)
            for first, k, j in product(range(0, o, width), range(q), range(c)):
                columns = g[:, j, :, k, first : first + width]
                M = buffer[: len(a), : columns.shape[2] * i].view(len(a), -1, i)
                torch.bmm(columns.mT, a[:, :, k], out=M)
                for m in M.unbind(0):
                    total[k, first : first + width].addcmul_(m, m)
        order = inputs.order()
        return total if order is None else total[..., order]

    def _tiles(self) -> Iterator[Iterator[tuple[slice, FactorBlock]]]:
        """Tiles of data and of outputs of a map, so small that Σ_t g_t a_tᵀ stays in the processor's cache.

        By `split`, not slicing: the backward pass of each slice would allocate a gradient of the full size.
        """
        n, c, _, q, o = self.g.shape
        at_once = max(1, _CACHED_FLOATS // max(1, c * q * self.arrangement.i))
        step = max(1, at_once // o)
        for g, a in zip(self.g.split(step), self.a.split(step), strict=True) if n else ():
            yield self._columns_of(g, a, at_once)

    def _columns_of(
        self, g: Float[Tensor, "k c r q o"], a: Float[Tensor, "k r q i"], at_once: int
    ) -> Iterator[tuple[slice, FactorBlock]]:
        for number, some in enumerate(g.split(at_once, -1)):
            yield slice(number * at_once, (number + 1) * at_once), replace(self, g=some, inputs=Given(a))

    @property
    def _single(self) -> bool:
        return self.one_position and self.g.shape[3] == 1

    def _squared_inputs_through(self, W: Float[Tensor, "q o i"]) -> Float[Tensor, "n qo"]:
        return torch.einsum("nqi,qoi->nqo", self.a[:, 0] ** 2, W).flatten(1)


def dense_factored_rows(block: Block, n: int, c: int, r: int, arrangement: Arrangement) -> Float[Tensor, "nc k"]:
    """Dense rows (n·c, k) of n data, computed a few data at a time so that patches and gradients stay in the cache."""
    if arrangement.q > 1 or arrangement.weight is None or block.attached:  # autograd does not support `out=`
        plain = block.plain()
        assert isinstance(plain, FactorBlock)
        return plain.matrices().flatten(2).flatten(0, 1)
    written = None
    step = max(1, _PATCHED_FLOATS // max(1, r * (arrangement.i + c * arrangement.o)))
    for start in range(0, n, step):
        some = block.data_at(slice(start, start + step)).plain()
        assert isinstance(some, FactorBlock)
        written = some.g.new_empty(n * c, arrangement.o * arrangement.i) if written is None else written
        some.write_(written[start * c : (start + step) * c])
    assert written is not None
    return written
