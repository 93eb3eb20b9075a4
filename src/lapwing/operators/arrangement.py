"""A layer's flat parameters as matrices W (q, o, i): q parallel linear maps (groups) from i inputs to o outputs.

The bias, if there is one, is the last input column (its input is constant 1). W is a permuted view of the weight
tensor, whose axes differ between layers: (o, i) for `nn.Linear`, (q i, o, k) for a transposed convolution, (i, o) for
the Conv1D of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.linalg import add_converted_
from lapwing.operators.grouped_diagonal import GroupedDiagonal


@dataclass(frozen=True)
class Arrangement:
    """Where weight and bias are in the flat parameters (slices), and how the weight becomes (q, o, inputs …).

    The flat weight is reshaped to `view`; `order` permutes its axes to (q, o, inputs …).
    """

    q: int
    o: int
    weight: slice | None
    bias: slice | None
    view: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @classmethod
    def plain(cls, q: int, o: int, i: int) -> Arrangement:
        """The arrangement of a flat vector that is (q, o, i) already, without a bias."""
        return cls(q, o, slice(0, q * o * i), None, (q, o, i), (0, 1, 2))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(s for s in (self.weight, self.bias) if s is not None)

    @property
    def joined(self) -> slice | None:
        """The contiguous slice of weight and bias together, or None if the bias does not follow the weight."""
        if self.weight is None or self.bias is None:
            return self.slices[0]
        return slice(self.weight.start, self.bias.stop) if self.weight.stop == self.bias.start else None

    @property
    def i(self) -> int:
        """Number of inputs, the bias column included."""
        # `view` describes the whole weight, even if only the bias is inferred: then its inputs do not count.
        return prod(self.view) // (self.q * self.o) * (self.weight is not None) + (self.bias is not None)

    def matrices(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... q o i"]:
        """The entries of flat vectors that belong to this layer, as matrices W."""
        lead = v.shape[:-1]
        columns = []
        if self.weight is not None:
            axes = (*range(len(lead)), *(len(lead) + axis for axis in self.order))
            W = v[..., self.weight].reshape(*lead, *self.view).permute(axes)
            columns.append(W.reshape(*lead, self.q, self.o, -1))
        if self.bias is not None:
            columns.append(v[..., self.bias].reshape(*lead, self.q, self.o, 1))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def flat_parts(self, W: Float[Tensor, "... q o i"]) -> tuple[Float[Tensor, "... _"], ...]:
        """The inverse of `matrices`: flat weight and flat bias, in the order of `slices`."""
        lead = W.shape[:-3]
        parts = []
        if self.weight is not None:
            n_inputs = self.i - (self.bias is not None)
            permuted = W[..., :n_inputs].reshape(*lead, *(self.view[axis] for axis in self.order))
            back = sorted(range(len(self.order)), key=self.order.__getitem__)  # the inverse permutation
            axes = (*range(len(lead)), *(len(lead) + axis for axis in back))
            parts.append(permuted.permute(axes).reshape(*lead, -1))
        if self.bias is not None:
            parts.append(W[..., -1].reshape(*lead, -1))
        return tuple(parts)

    def flat(self, W: Float[Tensor, "... q o i"], p: int) -> Float[Tensor, "... p"]:
        """Matrices as flat vectors of length p, zero outside this layer."""
        v = W.new_zeros(*W.shape[:-3], p)
        for s, part in zip(self.slices, self.flat_parts(W), strict=True):
            v[..., s] = part
        return v

    def add_(self, total: Float[Tensor, " p"], W: Float[Tensor, "q o i"]) -> None:
        """total ← total + W at this layer's slices, in place, without a flattened or converted copy of W."""
        if self.weight is not None:
            # A view of `total`, so that adding to it writes into the flat vector; `matrices` would copy.
            there = total[self.weight].view(self.view).permute(self.order)
            add_converted_(there, W[..., : self.i - (self.bias is not None)].reshape(there.shape))
        if self.bias is not None:
            total[self.bias].view(self.q, self.o).add_(W[..., -1])

    def coordinates(
        self, tensor: slice, entries: Int[Tensor, " k"]
    ) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"], Int[Tensor, " k"]]:
        """Indices (q, o, i) in W of entries of the flat weight or bias."""
        if tensor == self.bias:
            return entries // self.o, entries % self.o, torch.full_like(entries, self.i - 1)
        at = torch.unravel_index(entries, self.view)
        flat = torch.zeros_like(entries)
        for axis in self.order:
            flat = flat * self.view[axis] + at[axis]
        n_inputs = prod(self.view) // (self.q * self.o)
        return flat // (self.o * n_inputs), flat // n_inputs % self.o, flat % n_inputs

    def input_scales(self, D: GroupedDiagonal) -> Float[Tensor, " i"] | None:
        """D as one value per input column, or None if it is not constant on the weight or on the bias."""
        scales = []
        for s, n_columns in ((self.weight, self.i - (self.bias is not None)), (self.bias, 1)):
            if s is not None:
                value = D.constant_on(s)
                if value is None:
                    return None
                scales.append(value.expand(n_columns))
        return torch.cat(scales)

    def within(self, where: slice) -> tuple[Arrangement | None, slice]:
        """The arrangement of the tensors inside a slice, None if there are none, and their input columns.

        A slice contains a tensor completely or not at all.
        """
        weight, bias = (
            s is not None and where.start <= s.start and s.stop <= where.stop for s in (self.weight, self.bias)
        )
        if (weight + bias) in (0, len(self.slices)):
            return (self if weight or bias else None), slice(None)
        if weight:
            return replace(self, bias=None), slice(None, -1)
        return replace(self, weight=None), slice(-1, None)

    def shifted(self, offset: int) -> Arrangement:
        moved = [None if s is None else slice(s.start + offset, s.stop + offset) for s in (self.weight, self.bias)]
        return replace(self, weight=moved[0], bias=moved[1])
