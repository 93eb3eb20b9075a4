"""The prior precision P₀: a diagonal matrix with one value per group of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lapwing._types import Float, Int, Scalar, Tensor


@dataclass(frozen=True, eq=False)
class GroupedDiagonal:
    """diag(values[index]), where `index` (P,) holds the group of each parameter."""

    values: Float[Tensor, " g"]
    index: Int[Tensor, " p"]

    @classmethod
    def identity(cls, p: int, device: torch.device) -> GroupedDiagonal:
        """The identity, with a single group."""
        one = torch.ones(1, dtype=torch.float64, device=device)
        return cls(one, one_group(p).to(device))

    @property
    def p(self) -> int:
        return len(self.index)

    @property
    def n_groups(self) -> int:
        return len(self.values)

    @property
    def isotropic(self) -> bool:
        """Whether there is a single group: P₀ = δ I, so that one eigendecomposition of H serves every prior."""
        return self.n_groups == 1

    @cached_property
    def diagonal(self) -> Float[Tensor, " p"]:
        return self.values[self.index]

    @cached_property
    def sizes(self) -> Float[Tensor, " g"]:
        return self.group_sums(torch.ones(self.p, dtype=self.values.dtype, device=self.index.device))

    def group_sums(self, v: Float[Tensor, " p"]) -> Float[Tensor, " g"]:
        """Σ of v over the parameters of each group."""
        if self.isotropic:
            return v.sum()[None]
        return v.new_zeros(self.n_groups).index_add(0, self.index, v)

    def logdet(self) -> Scalar:
        return (self.sizes * self.values.log()).sum()

    def inverse(self) -> GroupedDiagonal:
        return replace(self, values=1 / self.values)

    def restricted(self, block: slice) -> GroupedDiagonal:
        """The part on a contiguous block of parameters; its groups are renumbered to those present there."""
        if self.isotropic:
            return GroupedDiagonal(self.values, self.index[block])
        present, index = self.index[block].unique(return_inverse=True)
        return GroupedDiagonal(self.values[present], index)

    def constant_on(self, block: slice) -> Scalar | None:
        """The value of this diagonal on a block if it is the same everywhere, else None."""
        first = self.index[block.start]
        return self.values[first] if bool((self.index[block] == first).all()) else None


def one_group(p: int) -> Int[Tensor, " p"]:
    """The index of p parameters that are all in group 0, expanded from one entry: it takes 8 bytes for any p."""
    return torch.zeros(1, dtype=torch.long).expand(p)
