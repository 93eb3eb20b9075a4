"""Rule for nn.Embedding: s_t = W[token_t], so the gradient of W[v] is the sum of g_t over positions with token v."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lapwing.network.jacobian import Block, EmbeddingBlock
from lapwing.network.layers.base import Calls, Rule, joined


class EmbeddingRule(Rule):
    """Does not apply with `max_norm`, which modifies the table in the forward pass, or `scale_grad_by_freq`, which
    changes the gradient."""

    parameters = frozenset({"weight"})

    def applies(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            return False
        return module.max_norm is None and not module.scale_grad_by_freq

    def divides(self, module: nn.Module, x: Tensor, n: int) -> bool:
        return x.ndim > 0 and x.shape[0] % n == 0

    def blocks(
        self, calls: Calls, gradients: Sequence[Sequence[Tensor]], where: Mapping[str, slice], n: int
    ) -> list[Block]:
        module = calls.module
        assert isinstance(module, nn.Embedding)
        if not calls.outputs:  # not called for these data: zero tokens
            g = module.weight.new_zeros(n, len(gradients), 0, module.embedding_dim)
            return [EmbeddingBlock(where["weight"], torch.zeros(n, 0, dtype=torch.long, device=g.device), g)]
        tokens = joined([x.reshape(n, -1).long() for x in calls.inputs])
        d = module.embedding_dim
        columns = [joined([g.reshape(n, -1, d) for g in column]) for column in gradients]
        g = torch.stack(columns, dim=1)
        if module.padding_idx is not None:  # autograd sets the gradient of this row to zero: do the same
            g = g * (tokens != module.padding_idx)[:, None, :, None]
        return [EmbeddingBlock.of(where["weight"], tokens, g)]
