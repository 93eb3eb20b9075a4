"""Observe or replace torch functions in this thread only; torch's own switches act on the whole process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


class Unfused(TorchFunctionMode):
    """Disables fused inference paths: torch.nn modules do not take them while any TorchFunctionMode is active."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class MathAttention(TorchFunctionMode):
    """Computes attention by its formula: the fused kernels lack second derivatives and forward-mode AD."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _plain_formula(*args, **kwargs)
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            # With need_weights=True it multiplies matrices; otherwise it calls the fused kernel internally, where
            # this mode cannot intercept it.
            return func(*args, **{**kwargs, "need_weights": True})[0], None
        return func(*args, **kwargs)


def _plain_formula(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """softmax(Q Kᵀ / √d + mask) V, in differentiable operations."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the internal function takes additive masks only
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    return torch._scaled_dot_product_attention_math(query, key, value, attn_mask, *args, **kwargs)[0]


class PlainNorms(TorchFunctionMode):
    """Computes normalisations by their formulas: third derivatives of torch's kernels are wrong (torch 2.13)."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _NORMS.get(func, func)(*args, **(kwargs or {}))


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    return _affine(_standardised(x, axes, eps), weight, bias)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * (x.square().mean(axes, keepdim=True) + eps).rsqrt(), weight, None)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = _standardised(x.reshape(len(x), groups, -1), (-1,), eps).reshape(x.shape)
    return _affine(grouped, *(_by_channel(v, x) for v in (weight, bias)))


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    return _affine(_standardised(x, tuple(range(2, x.ndim)), eps), *(_by_channel(v, x) for v in (weight, bias)))


_NORMS: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
}


def _standardised(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _by_channel(v: Tensor | None, x: Tensor) -> Tensor | None:
    return None if v is None else v.reshape(-1, *[1] * (x.ndim - 2))


class UseOfTensors(TorchFunctionMode):
    """Records whether any of the given tensors enters a computation (`used`), and attention is called (`attends`)."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.ids, self.used, self.attends = {id(tensor) for tensor in tensors}, False, False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.attends = self.attends or func in _ATTENTION
        result = func(*args, **kwargs)
        computed = isinstance(result, Tensor | tuple | list)  # reading .dtype or .ndim is no use of the values
        self.used = self.used or (computed and any(id(t) in self.ids for t in _tensors((args, kwargs))))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
