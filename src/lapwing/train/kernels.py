"""The user's module run as it is trained, by kernels that can be differentiated twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from lapwing.errors import InputError
from lapwing.runtime.sandbox import MathAttention, autocast_devices, install


@contextmanager
def twice_differentiable(model: nn.Module, *, attends: bool) -> Iterator[None]:
    """Attention by its plain formula, and recurrent layers without cuDNN, inside: their fast kernels have no second
    derivative. The switches are as they were afterwards.
    """
    with ExitStack() as stack:
        if attends:
            stack.enter_context(MathAttention())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def refuse_autocast(what: str) -> None:
    """Gradients of gradients lose what half precision leaves of them, and a loss scaler would scale the penalty."""
    on = autocast_devices()
    if on:
        raise InputError(
            f"{what} was called inside torch.autocast (on {', '.join(on)}). The penalty squares gradients, and the "
            "variances are logarithms: half precision loses both. Call it outside autocast, without GradScaler; the "
            "model's own dtype is used."
        )


@contextmanager
def installed(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other tensors in the place of some of its parameters, shared ones everywhere.

    Buffers are the model's own: running statistics move. The parameters are back afterwards.
    """
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    own: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first in tensors:
            aliases[name], own[first] = first, parameter
    try:
        install(model, tensors, aliases)
        yield
    finally:
        install(model, own, aliases)
