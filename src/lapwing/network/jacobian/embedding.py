"""The columns of an embedding table: a row of J is nonzero only at the tokens of its datum.

An embedding s_t = W[token_t] has ∂f_c/∂W[v] = Σ_{t: token_t = v} g_ct. Only tokens that occur are stored, each once, so
a row takes at most (positions) · (dimensions) entries, whatever the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.network.jacobian.block import Block, padded
from lapwing.operators import GroupedDiagonal


@dataclass(frozen=True, eq=False)
class EmbeddingBlock(Block):
    """Tokens (n, r) and gradients g (n, c, r, d) of the rows of one table W (vocabulary, d).

    The tokens of a datum are distinct; unused slots have zero gradients. Construct with `of`.
    """

    where: slice
    tokens: Int[Tensor, "n r"]
    g: Float[Tensor, "n c r d"]

    @classmethod
    def of(cls, where: slice, tokens: Int[Tensor, "n t"], g: Float[Tensor, "n c t d"]) -> EmbeddingBlock:
        """From gradients at every position: gradients of positions with the same token are summed."""
        ordered, order = tokens.sort(dim=1)
        new = torch.zeros_like(ordered)
        # Number distinct tokens by sorting: a new slot starts where a sorted token differs from its predecessor.
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        slot = torch.empty_like(order).scatter_(1, order, new.cumsum(1))  # equal tokens get the same slot
        distinct = torch.zeros_like(tokens).scatter_(1, slot, tokens)
        summed = torch.zeros_like(g).scatter_add_(2, slot[:, None, :, None].expand_as(g), g)
        used = int(slot.max()) + 1 if slot.numel() else 0
        return cls(where, distinct[:, :used], summed[:, :, :used])

    @property
    def slices(self) -> tuple[slice, ...]:
        return (self.where,)

    @property
    def row_floats(self) -> int:
        return self.g.shape[2] * self.g.shape[3]

    @property
    def contracted_floats(self) -> int:
        return self.row_floats

    def parts(self) -> tuple[Float[Tensor, "n c k"], ...]:
        return (self._columns(torch.arange(self._vocabulary, device=self.g.device)),)

    def entries(self, tensor: slice, at: Int[Tensor, " k"]) -> Float[Tensor, "n c k"]:
        n, c, r, d = self.g.shape
        kept, which = (at // d).unique(return_inverse=True)
        found = torch.searchsorted(kept, self.tokens.contiguous())
        there = torch.cat([kept, kept.new_full((1,), -1)])[found] == self.tokens
        # The slot of each token in each datum. Unused slots hold token 0 too, but come last: take the first.
        slots = torch.full((n, len(kept) + 1), r, device=at.device)
        every = torch.arange(r, device=at.device).expand(n, -1)
        slots.scatter_reduce_(1, torch.where(there, found, len(kept)), every, "amin")
        g = torch.cat([self.g, self.g.new_zeros(n, c, 1, d)], dim=2)
        data = torch.arange(n, device=at.device)[:, None]
        return g[data, :, slots[:, which], at % d].transpose(1, 2)

    @property
    def c(self) -> int:
        return self.g.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.g.dtype

    @property
    def attached(self) -> bool:
        return self.g.requires_grad

    def mv(self, v: Float[Tensor, "s p"]) -> Float[Tensor, "s n c"]:
        V = self._at_tokens(v[:, self.where]).to(self.g.dtype)
        return torch.einsum("ncrd,snrd->snc", self.g, V).double()

    def quad(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c c"]:
        return (self._weighted(weights) @ self.g.flatten(2).mT).double()

    def quad_diagonal(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c"]:
        return (self._weighted(weights) * self.g.flatten(2)).sum(-1).double()

    def cross(self, other: Block, D: GroupedDiagonal) -> Float[Tensor, "nc md"]:
        assert isinstance(other, EmbeddingBlock)
        # Only tokens that occur on both sides contribute: form just those columns.
        mine, theirs = self.tokens.unique(), other.tokens.unique()
        shared = mine[torch.isin(mine, theirs)]
        weights = D.diagonal[self.where].reshape(self._vocabulary, -1)[shared].flatten()
        J, K = self._columns(shared), other._columns(shared)
        return (J.flatten(0, 1) * weights) @ K.flatten(0, 1).T

    def doubled(self) -> EmbeddingBlock:
        return replace(self, g=self.g.double())

    def sum_squares(self) -> tuple[Float[Tensor, " k"], ...]:
        total = torch.zeros(self.where.stop - self.where.start, dtype=torch.float64, device=self.g.device)
        self.add_squares_(total)
        return (total,)

    def add_squares_(self, total: Float[Tensor, " k"]) -> None:
        """total ← total + Σ squares; only the rows of tokens that occur are touched."""
        squares = (self.g**2).sum(1).to(total.dtype).flatten(0, 1)
        total.view(self._vocabulary, -1).index_add_(0, self.tokens.flatten(), squares)

    def shifted(self, offset: int) -> EmbeddingBlock:
        return replace(self, where=slice(self.where.start + offset, self.where.stop + offset))

    def concatenated(self, others: Sequence[Block]) -> EmbeddingBlock:
        blocks = [self, *(other for other in others if isinstance(other, EmbeddingBlock))]
        r = max(block.tokens.shape[1] for block in blocks)
        tokens = torch.cat([padded(block.tokens, r, 1) for block in blocks])
        return replace(self, tokens=tokens, g=torch.cat([padded(block.g, r, 2) for block in blocks]))

    def single_rows(self) -> EmbeddingBlock:
        c = self.g.shape[1]
        return replace(self, tokens=self.tokens.repeat_interleave(c, 0), g=self.g.flatten(0, 1)[:, None])

    def outputs_at(self, rows: Int[Tensor, " k"]) -> EmbeddingBlock:
        return replace(self, g=self.g[:, rows])

    def data_at(self, data: slice) -> EmbeddingBlock:
        return replace(self, tokens=self.tokens[data], g=self.g[data])

    @property
    def _vocabulary(self) -> int:
        return (self.where.stop - self.where.start) // self.g.shape[-1]

    def _at_tokens(self, v: Float[Tensor, "... k"]) -> Float[Tensor, "... n r d"]:
        """The rows of flat tables v at the tokens of each datum."""
        return v.reshape(*v.shape[:-1], self._vocabulary, -1)[..., self.tokens, :]

    def _weighted(self, weights: Float[Tensor, " p"]) -> Float[Tensor, "n c rd"]:
        return (self.g * self._at_tokens(weights[self.where]).to(self.g.dtype)[:, None]).flatten(2)

    def _columns(self, kept: Int[Tensor, " v"]) -> Float[Tensor, "n c vd"]:
        """The dense columns of some tokens (sorted), in float64."""
        n, c, _, d = self.g.shape
        if not len(kept):
            return self.g.new_zeros(n, c, 0, dtype=torch.float64)
        # Tokens that are not in `kept` find some other one: their gradients are masked.
        at = torch.searchsorted(kept, self.tokens.contiguous()).clamp(max=len(kept) - 1)
        g = self.g.double() * (kept[at] == self.tokens)[:, None, :, None]
        dense = torch.zeros(n, c, len(kept), d, dtype=torch.float64, device=self.g.device)
        return dense.scatter_add_(2, at[:, None, :, None].expand_as(g), g).flatten(2)
