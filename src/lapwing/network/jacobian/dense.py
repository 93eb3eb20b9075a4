"""A block of columns stored densely, for parameters without a layer rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.network.jacobian.block import Block, contracted, picked
from lapwing.operators import GroupedDiagonal

_CACHED_FLOATS = 1 << 18  # of rows whose products are taken together


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """The dense columns of one parameter tensor."""

    where: slice
    values: Float[Tensor, "n c k"]

    @property
    def slices(self) -> tuple[slice, ...]:
        return (self.where,)

    @property
    def c(self) -> int:
        return self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def attached(self) -> bool:
        return self.values.requires_grad

    def dense_rows(self) -> Float[Tensor, "nc k"]:
        return self.values.flatten(0, 1)

    def parts(self) -> tuple[Float[Tensor, "n c k"], ...]:
        return (self.values.double(),)

    def entries(self, tensor: slice, at: Int[Tensor, " k"]) -> Float[Tensor, "n c k"]:
        return self.values[..., at]

    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        return torch.einsum("nck,sk->snc", self.values.double(), v[:, self.where])

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return ((self.values * weights[self.where].to(self.values.dtype)) @ self.values.mT).double()

    def quads(self, weights: Float[Tensor, "s p"]) -> Float[Tensor, "s n c c"]:
        w = weights[:, self.where].to(self.values.dtype)
        step = max(1, _CACHED_FLOATS // max(1, self.values[0].numel()))
        return torch.cat([contracted(some, w) for some in self.values.split(step)], 1).double()

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return (self.values**2 @ weights[self.where].to(self.values.dtype)).double()

    def has_factored_cross(self, other: Block, D: GroupedDiagonal) -> bool:
        return False

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        (values,) = other.parts()
        return (self.values.double().flatten(0, 1) * D.diagonal[self.where]) @ values.flatten(0, 1).T

    def doubled(self) -> DenseBlock:
        return replace(self, values=self.values.double())

    def sum_squares(self) -> tuple[Float[Tensor, " k"], ...]:
        return ((self.values.double() ** 2).sum((0, 1)),)

    def shifted(self, offset: int) -> DenseBlock:
        return replace(self, where=slice(self.where.start + offset, self.where.stop + offset))

    def concatenated(self, others: Sequence[Block]) -> DenseBlock:
        # `parts`, as other batches may have stored the same columns as factors (see `Block.kept`).
        rest = (torch.cat(other.parts(), -1).to(self.values) for other in others)
        return replace(self, values=torch.cat([self.values, *rest]))

    def single_rows(self) -> DenseBlock:
        return replace(self, values=self.values.flatten(0, 1)[:, None])

    def outputs_at(self, rows: Int[Tensor, " k"]) -> DenseBlock:
        return replace(self, values=picked(self.values, rows))

    def data_at(self, data: slice) -> DenseBlock:
        return replace(self, values=self.values[data])
