"""Rules for nn.Linear, s_t = W a_t + b at any number of positions t, and for dense layers that store Wᵀ."""

from __future__ import annotations

from torch import Tensor, nn

from lapwing.network.layers.base import FactorRule
from lapwing.operators import Arrangement


class LinearRule(FactorRule):
    def applies(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward

    def arrangement(self, module: nn.Module, weight: slice | None, bias: slice | None) -> Arrangement:
        assert isinstance(module, nn.Linear)
        o, i = module.out_features, module.in_features
        return Arrangement(1, o, weight, bias, (1, o, i), (0, 1, 2))

    def divides(self, module: nn.Module, x: Tensor, n: int) -> bool:
        return x.ndim > 1 and x.numel() % (n * x.shape[-1]) == 0

    def inputs(self, module: nn.Module, x: Tensor, n: int) -> Tensor:
        # (n, …, i) or (n · T, …, i): all axes between batch and features are positions
        return x.reshape(n, -1, 1, x.shape[-1])

    def gradients(self, module: nn.Module, g: Tensor, n: int) -> Tensor:
        return g.reshape(n, -1, 1, g.shape[-1])


class TransposedLinearRule(FactorRule):
    """`Conv1D` of the Hugging Face GPT models: s = x W + b with W (in, out)."""

    def applies(self, module: nn.Module) -> bool:
        return f"{type(module).__module__}.{type(module).__qualname__}" == "transformers.pytorch_utils.Conv1D"

    def arrangement(self, module: nn.Module, weight: slice | None, bias: slice | None) -> Arrangement:
        i, o = module.weight.shape  # type: ignore[misc]
        return Arrangement(1, o, weight, bias, (1, i, o), (0, 2, 1))

    def inputs(self, module: nn.Module, x: Tensor, n: int) -> Tensor:
        return x.reshape(n, -1, 1, x.shape[-1])

    def gradients(self, module: nn.Module, g: Tensor, n: int) -> Tensor:
        return g.reshape(n, -1, 1, g.shape[-1])
