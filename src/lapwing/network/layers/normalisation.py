"""Rules for scales and shifts of normalisation layers, s = γ x̂ + β: the gradients are Σ_t x̂_t g_t and Σ_t g_t."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lapwing.network.layers.base import DirectRule, summed_over_positions


class TrailingNormRule(DirectRule):
    """LayerNorm and RMSNorm: the parameters have the shape of the normalised trailing axes."""

    def applies(self, module: nn.Module) -> bool:
        known = (nn.LayerNorm, nn.RMSNorm)
        return isinstance(module, known) and any(type(module).forward is kind.forward for kind in known)

    def prepared(self, module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, list(module.normalized_shape), eps=module.eps)
        return F.rms_norm(x, list(module.normalized_shape), eps=module.eps)

    def rows(self, module: nn.Module, x: Tensor, g: Tensor, n: int) -> Mapping[str, Tensor]:
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        shape = torch.Size(module.normalized_shape)
        products = {"weight": g * x, "bias": g}
        return {name: summed_over_positions(v, n, shape) for name, v in products.items()}


class ChannelNormRule(DirectRule):
    """BatchNorm in eval mode, GroupNorm and InstanceNorm: one scale and shift per channel, axis 1."""

    def applies(self, module: nn.Module) -> bool:
        bases = (_BatchNorm, nn.GroupNorm, _InstanceNorm)
        return isinstance(module, bases) and any(type(module).forward is base.forward for base in bases)

    def prepared(self, module: nn.Module, x: Tensor) -> Tensor:
        return _normalised(module, x)

    def rows(self, module: nn.Module, x: Tensor, g: Tensor, n: int) -> Mapping[str, Tensor]:
        products = {"weight": (g * x)[..., None], "bias": g[..., None]}
        return {name: v.flatten(2).sum(-1).reshape(n, -1, x.shape[1]).sum(1) for name, v in products.items()}


def _normalised(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, _BatchNorm):
        return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, _InstanceNorm)
    of_input = module.running_mean is None
    return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=of_input, eps=module.eps)
