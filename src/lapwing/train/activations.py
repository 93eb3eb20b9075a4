"""Activations whose second derivative says something: piecewise linear ones refused by name, or replaced."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lapwing.errors import InputError, InputTypeError
from lapwing.network.module import check_module

_MODULES = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.RReLU,
    nn.PReLU,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Threshold,
    nn.Hardshrink,
    nn.Softshrink,
)
_RELU: tuple[Any, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys(_RELU, "relu"),
    **dict.fromkeys((F.relu6,), "relu6"),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), "leaky_relu"),
    **dict.fromkeys((F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_), "rrelu"),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), "prelu"),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), "hardtanh"),
    **dict.fromkeys((F.threshold, torch.threshold, torch.threshold_), "threshold"),
    **dict.fromkeys((F.hardsigmoid,), "hardsigmoid"),
    **dict.fromkeys((F.hardswish,), "hardswish"),
    **dict.fromkeys((F.hardshrink, F.softshrink), "shrink"),
}
_WHY = (
    "its second derivative is zero wherever there is one, so the gradient of the penalty says nothing of how it bends. "
    "Train a copy with softplus in its place: model = lw.train.smooth(model); or allow_piecewise=True."
)


def refuse_piecewise(model: nn.Module) -> None:
    """Name the first module that is piecewise linear."""
    for path, module in model.named_modules():
        if isinstance(module, _MODULES):
            raise InputError(f"The activation '{path or 'model'}' is {type(module).__name__}, piecewise linear: {_WHY}")


class Piecewise(TorchFunctionMode):
    """Which piecewise linear functions a forward pass calls, also those that are no module."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is None:
            self.found = _FUNCTIONS.get(func)
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        if self.found is not None:
            raise InputError(
                f"The model's forward calls torch.nn.functional.{self.found}, which is piecewise linear: {_WHY} "
                "A function that is written into the forward itself has to be replaced there, by "
                "torch.nn.functional.softplus."
            )


class SmoothLeaky(nn.Module):
    """a x + (1 − a) softplus(x): a leaky ReLU without its corner. PReLU's a is learned, as before."""

    def __init__(self, slope: float | nn.Parameter) -> None:
        super().__init__()
        self.slope: float | Tensor
        if isinstance(slope, nn.Parameter):
            self.weight = slope
        else:
            self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        a = self.slope if "weight" not in self._parameters else self.weight
        if isinstance(a, Tensor) and len(a) > 1:
            a = a.reshape(-1, *[1] * (x.ndim - 2))
        return a * x + (1 - a) * F.softplus(x)


def smooth(model: nn.Module) -> nn.Module:
    """A copy with softplus where ReLU and its kin were, and with the weights it had; the model is untouched.

    Hardtanh becomes tanh, Hardsigmoid a sigmoid, Hardswish SiLU, and leaky ReLUs keep their slopes. Also where an
    attribute of a module is the function itself, as the activation of a TransformerEncoderLayer. The copy has to be
    trained: it is another network.
    """
    check_module("train.smooth", model)
    try:
        copy = deepcopy(model)
    except Exception as error:
        raise InputTypeError(
            f"train.smooth: the model cannot be copied ({type(error).__name__}: {error}). Build it with "
            "torch.nn.Softplus instead of ReLU."
        ) from error
    if isinstance(copy, _MODULES):
        return _smoothed(copy, "model")
    replaced: dict[int, nn.Module] = {}
    for path, module in list(copy.named_modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, _MODULES):
                where = f"{path}.{name}" if path else name
                module._modules[name] = replaced.setdefault(id(child), _smoothed(child, where))
        _replace_functions(module)
    return copy


def _replace_functions(module: nn.Module) -> None:
    for name, value in list(vars(module).items()):
        if any(value is function for function in _RELU):
            setattr(module, name, F.softplus)
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0  # what the fused path would compute


def _smoothed(module: nn.Module, path: str) -> nn.Module:
    if isinstance(module, nn.PReLU):
        return SmoothLeaky(module.weight)
    if isinstance(module, nn.LeakyReLU):
        return SmoothLeaky(module.negative_slope)
    if isinstance(module, nn.RReLU):
        return SmoothLeaky((module.lower + module.upper) / 2)
    if isinstance(module, nn.Threshold) and (module.threshold, module.value) != (0, 0):
        raise InputError(f"train.smooth: '{path}' is {module}, which jumps, and no smooth function is close to it.")
    if isinstance(module, nn.Hardshrink | nn.Softshrink):
        raise InputError(f"train.smooth: '{path}' is {type(module).__name__}; replace it by nn.Tanhshrink.")
    # ReLU6 is a Hardtanh in torch
    if isinstance(module, nn.Hardtanh) and not isinstance(module, nn.ReLU6):
        return nn.Tanh()
    if isinstance(module, nn.Hardsigmoid):
        return nn.Sigmoid()
    return nn.SiLU() if isinstance(module, nn.Hardswish) else nn.Softplus()
