"""Local reparametrisation: a layer's pre-activations drawn for every datum, in place of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.network.parameters import ParamLayout

_TINY = 1e-12  # under the root, whose derivative is infinite at a variance of zero
_OF_LINEAR = (nn.Linear.forward,)
_OF_CONVOLUTION = {nn.Conv1d.forward: F.conv1d, nn.Conv2d.forward: F.conv2d, nn.Conv3d.forward: F.conv3d}


@dataclass(frozen=True)
class LocalLayers:
    """Layers that draw their outputs: path → the names of their tensors that are inferred."""

    tensors: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, model: nn.Module, layout: ParamLayout, calls: Mapping[str, tuple[int, ...]]) -> LocalLayers:
        """Plain layers whose weight is inferred and is theirs alone, called once; a linear one on (B, features)."""
        holders: dict[int, int] = {}
        for _, tensor in model.named_parameters(remove_duplicate=False):
            holders[id(tensor)] = holders.get(id(tensor), 0) + 1
        found = {}
        for path, axes in calls.items():
            module = model.get_submodule(path)
            prefix = f"{path}." if path else ""
            own = [name for name, _ in module.named_parameters(recurse=False)]
            names = tuple(prefix + name for name in own if prefix + name in layout)
            alone = all(holders[id(t)] == 1 for t in module.parameters(recurse=False))
            if alone and len(axes) == 1 and prefix + "weight" in names and _plain(module, axes[0]):
                found[path] = names
        return cls(found)

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(name for names in self.tensors.values() for name in names)

    @contextmanager
    def drawing(
        self, model: nn.Module, stds: Mapping[str, Tensor], normal: Callable[[Tensor], Tensor]
    ) -> Iterator[None]:
        """Their forward passes replaced inside; hooks on them run as ever."""
        modules = [model.get_submodule(path) for path in self.tensors]
        try:
            for module, path in zip(modules, self.tensors, strict=True):
                prefix = f"{path}." if path else ""
                weight_var, bias_var = stds[f"{prefix}weight"].square(), stds.get(f"{prefix}bias")
                bias_var = None if bias_var is None else bias_var.square()
                module.forward = partial(_drawn, module, weight_var, bias_var, normal)
            yield
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)


def _plain(module: nn.Module, axes: int) -> bool:
    own = "forward" not in module.__dict__ and not hasattr(module, "parametrizations")
    forward: Any = type(module).forward
    if forward in _OF_CONVOLUTION:
        return own and module.padding_mode == "zeros" and axes == len(module.kernel_size) + 2  # type: ignore[arg-type]
    return own and forward in _OF_LINEAR and axes == 2


def _drawn(
    module: nn.Module, weight_var: Tensor, bias_var: Tensor | None, normal: Callable[[Tensor], Tensor], a: Tensor
) -> Tensor:
    """W a + b + ε √(σ_W² a² + σ_b²), ε for every output of every datum."""
    mean = type(module).forward(module, a)
    square = a.square()
    if isinstance(module, nn.Linear):
        variance = F.linear(square, weight_var, bias_var)
    else:
        convolve: Any = _OF_CONVOLUTION[type(module).forward]
        variance = convolve(square, weight_var, bias_var, module.stride, module.padding, module.dilation, module.groups)
    return torch.addcmul(mean, (variance + _TINY).sqrt(), normal(mean))
