"""Rule for nn.PReLU: s = max(x, 0) + w min(x, 0) with one slope w for all channels, or one per channel."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from lapwing.network.layers.base import DirectRule


class PReLURule(DirectRule):
    def applies(self, module: nn.Module) -> bool:
        return isinstance(module, nn.PReLU) and type(module).forward is nn.PReLU.forward

    def rows(self, module: nn.Module, x: Tensor, g: Tensor, n: int) -> Mapping[str, Tensor]:
        assert isinstance(module, nn.PReLU)
        slopes = g * x.clamp(max=0)
        if module.num_parameters == 1:
            return {"weight": slopes.reshape(n, -1).sum(1, keepdim=True)}
        return {"weight": slopes[..., None].flatten(2).sum(-1).reshape(n, -1, x.shape[1]).sum(1)}
