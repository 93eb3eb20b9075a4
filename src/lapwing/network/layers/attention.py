"""Rule for nn.MultiheadAttention, whose projections are computed by functions, where no hook can capture them.

The forward of the borrowed module is replaced by an equivalent one that records inputs and outputs of the projections.
Self-attention projects by one map W (3E, E). Otherwise queries, keys and values have a map each, and the shared bias is
a dense block. The output projection is an nn.Linear with its own rule, and is called as a module here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.network.jacobian import Block, DenseBlock, FactorBlock, padded
from lapwing.network.layers.base import (
    Calls,
    Formed,
    RewrittenRule,
    empty_block,
    factor_block,
    joined,
)
from lapwing.operators import Arrangement

_PACKED = "qkv"  # names of the recorded maps
_APART = ("q", "k", "v")
_SEPARATE = tuple(f"{name}_proj_weight" for name in _APART)
_APPENDED = ("bias_k", "bias_v")
_UNDIVIDED = "undivided"

Gradients = Sequence[Sequence[Tensor]]  # [column][call]
Places = Mapping[str, slice]


class AttentionRule(RewrittenRule):
    """Supports masks, `add_bias_kv`, `add_zero_attn`, `kdim` and `vdim`, and both values of `batch_first`."""

    parameters = frozenset({"in_proj_weight", "in_proj_bias", *_SEPARATE, *_APPENDED})

    def applies(self, module: nn.Module) -> bool:
        if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
            return False
        out = module.out_proj
        # torch's forward reads the weights of out_proj without calling it, so its hooks never run. Here it is called,
        # and hooks would run: the rule applies only if there are none.
        plain = type(out).forward is nn.Linear.forward and not out._forward_hooks and not out._forward_pre_hooks
        own = module.__dict__.get("forward")
        return plain and (own is None or (isinstance(own, partial) and own.func is _attend))

    def divides(self, module: nn.Module, x: Tensor, n: int) -> bool:
        return x.ndim == 3 and x.shape[0] % n == 0

    def forward(self, module: nn.Module, calls: Calls) -> Callable[..., Any]:
        assert isinstance(module, nn.MultiheadAttention)
        return partial(_attend, module, calls)

    def blocks(self, calls: Calls, gradients: Gradients, where: Places, n: int) -> list[Block]:
        assert isinstance(calls.module, nn.MultiheadAttention)
        if _UNDIVIDED in calls.maps:
            raise ModelError(
                "nn.MultiheadAttention was called with a batch axis for the first data and without one for these. "
                "Give it (batch, time, features), or (time, batch, features), for all data."
            )
        e = calls.module.embed_dim
        blocks: list[Block] = []
        if any(name in calls.maps for name in _APART) or not calls.module._qkv_same_embed_dim:
            blocks += _maps_apart(calls, gradients, where, n, e)
        elif "in_proj_weight" in where or "in_proj_bias" in where:
            arrangement = _arranged(where.get("in_proj_weight"), where.get("in_proj_bias"), 3 * e, e)
            blocks.append(_map(calls, arrangement, *calls.of(_PACKED, gradients), n))
        for name in _APPENDED:
            if name in where:
                blocks.append(DenseBlock(where[name], _summed(calls, calls.of(name, gradients)[1], n, e)))
        return blocks


def _maps_apart(calls: Calls, gradients: Gradients, where: Places, n: int, e: int) -> Iterator[Block]:
    maps = [_of_map(calls, gradients, j) for j in range(3)]
    for (inputs, g), place in zip(maps, _weights_apart(where, e), strict=True):
        if place is not None:
            yield _map(calls, _arranged(place, None, e, (place.stop - place.start) // e), inputs, g, n)
    if "in_proj_bias" in where:
        yield DenseBlock(where["in_proj_bias"], torch.cat([_summed(calls, g, n, e) for _, g in maps], dim=-1))


def _map(calls: Calls, arrangement: Arrangement, inputs: list[Tensor], gradients: Gradients, n: int) -> FactorBlock:
    if not inputs:  # not called for these data: zero positions
        return empty_block(arrangement, next(calls.module.parameters(recurse=False)), n, len(gradients))
    columns = [joined([_positions(g, n) for g in column]) for column in gradients]
    return factor_block(arrangement, Formed(arrangement, lambda: [_positions(x, n) for x in inputs]), columns)


def _summed(calls: Calls, gradients: Gradients, n: int, e: int) -> Tensor:
    """Gradients summed over positions and calls: (n, c, e)."""
    empty = next(calls.module.parameters(recurse=False)).new_zeros(n, e)
    return torch.stack([sum((g.reshape(n, -1, e).sum(1) for g in column), empty) for column in gradients], dim=1)


def _weights_apart(where: Places, e: int) -> list[slice | None]:
    """Slices of the weights of q, k and v: separate tensors, or rows of the packed one."""
    packed = where.get("in_proj_weight")
    if packed is None:
        return [where.get(name) for name in _SEPARATE]
    starts = [packed.start + j * e * e for j in range(3)]
    return [slice(start, start + e * e) for start in starts]


def _of_map(calls: Calls, gradients: Gradients, j: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Inputs and gradients of the map j of q, k, v; a packed call (self-attention) contributes to each."""
    inputs, g = calls.of(_APART[j], gradients)
    packed, g_packed = calls.of(_PACKED, gradients)
    both = [own + [s.chunk(3, -1)[j] for s in shared] for own, shared in zip(g, g_packed, strict=True)]
    return inputs + packed, both


def _arranged(weight: slice | None, bias: slice | None, o: int, i: int) -> Arrangement:
    return Arrangement(1, o, weight, bias, (1, o, i), (0, 1, 2))


def _positions(x: Tensor, n: int) -> Tensor:
    """(n · m, t, i) → (n, r, 1, i)."""
    return x.reshape(n, -1, 1, x.shape[-1])


def _attend(
    module: nn.MultiheadAttention,
    calls: Calls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Equivalent of nn.MultiheadAttention.forward in eval mode, with the batch axis first internally."""
    if query.ndim != 3:  # no batch axis: recorded as such, and the rule check finds that it cannot be split by datum
        options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        output = nn.MultiheadAttention.forward(module, query, key, value, *options)
        calls.keep(query, output[0], of=_UNDIVIDED)
        return output
    q, k, v = _projected(module, calls, query, key, value)
    k, v = _with_appended(module, calls, k, v)
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    # As in torch: in this case is_causal replaces attn_mask, otherwise it is ignored.
    hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if hint else _mask(attn_mask, key_padding_mask, q, k)
    if need_weights:
        scores = q * sqrt(1.0 / q.shape[-1]) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        heads = weights @ v
    else:
        heads = F.scaled_dot_product_attention(q, k, v, mask, 0.0, hint)
    s = module.out_proj(heads.transpose(1, 2).flatten(2))
    s = s if module.batch_first else s.transpose(0, 1).contiguous()
    return s, (weights.mean(1) if average_attn_weights else weights) if need_weights else None


def _projected(
    module: nn.MultiheadAttention, calls: Calls, query: Tensor, key: Tensor, value: Tensor
) -> Sequence[Tensor]:
    itself = query is key and key is value
    inputs = [x if module.batch_first else x.transpose(0, 1) for x in (query, key, value)]
    if itself and module._qkv_same_embed_dim:
        s = F.linear(inputs[0], module.in_proj_weight, module.in_proj_bias)
        _keep(calls, inputs[0], s, _PACKED)
        return s.chunk(3, -1)
    packed = module._qkv_same_embed_dim
    weights = module.in_proj_weight.chunk(3) if packed else [getattr(module, name) for name in _SEPARATE]
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    outputs = [F.linear(x, W, b) for x, W, b in zip(inputs, weights, biases, strict=True)]
    for name, x, s in zip(_APART, inputs, outputs, strict=True):
        _keep(calls, x, s, name)
    return outputs


def _keep(calls: Calls, x: Tensor, s: Tensor, name: str) -> None:
    if s.requires_grad or calls.attached:  # else the map is frozen, and so is all before it
        calls.keep(x, s, of=name)


def _with_appended(module: nn.MultiheadAttention, calls: Calls, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values with the learnt position (`add_bias_kv`) and the zero position (`add_zero_attn`) appended."""
    both = [k, v]
    if module.bias_k is not None and module.bias_v is not None:
        learnt = [b.expand(len(k), 1, -1) for b in (module.bias_k, module.bias_v)]
        for name, b in zip(_APPENDED, learnt, strict=True):
            _keep(calls, b, b, name)
        both = [torch.cat(pair, dim=1) for pair in zip(both, learnt, strict=True)]
    return [padded(x, x.shape[1] + 1, 1) for x in both] if module.add_zero_attn else both


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The sum of both masks, to be added to the scores (n, heads, l, s). Appended positions are not masked."""
    masks = []
    if attn_mask is not None:  # (l, s), or (n · heads, l, s)
        mask = _additive(attn_mask, q, k)
        masks.append(mask if mask.ndim == 2 else mask.unflatten(0, q.shape[:2]))
    if key_padding_mask is not None:  # (n, s)
        masks.append(_additive(key_padding_mask, q, k)[:, None, None])
    return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, -torch.inf)
    return padded(mask, k.shape[-2], mask.ndim - 1)
