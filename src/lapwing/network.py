"""The user's module as a pure function of its inputs and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lapwing._types import Tensor
from lapwing.data import ModelInput
from lapwing.errors import InputError, InputTypeError, LapwingError, ModelError, ShapeError
from lapwing.linalg import all_finite
from lapwing.sandbox import install


@dataclass(frozen=True, eq=False)
class Network:
    """The user's module with a private copy of its tensors: a pure function of (x, θ)."""

    model: nn.Module
    tensors: Mapping[str, Tensor]  # parameters and buffers as they were
    aliases: Mapping[str, str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Network:
        listed: dict[int, str] = {}
        aliases: dict[str, str] = {}
        tensors: dict[str, Tensor] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            aliases[name] = listed.setdefault(id(tensor), name)
            if aliases[name] == name:
                tensors[name] = tensor.detach().clone()
        parameters = {name for name, _ in model.named_parameters()}
        return cls(model, tensors, aliases, frozenset(set(tensors) - parameters))

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all floating-point parameters, or None when they differ."""
        dtypes = {t.dtype for n, t in self.tensors.items() if n not in self.buffers and t.is_floating_point()}
        return dtypes.pop() if len(dtypes) == 1 else None

    @cached_property
    def device(self) -> torch.device:
        return next(t.device for n, t in self.tensors.items() if n not in self.buffers)

    def placed(self, x: ModelInput) -> ModelInput:
        """Inputs on the model's device; floating-point ones in the model's dtype."""

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = self.dtype if value.is_floating_point() and self.dtype is not None else value.dtype
            moved = value.detach().to(self.device, dtype)
            return moved.clone() if moved.is_inference() else moved

        return x.mapped(place, x.n)

    def __call__(self, x: ModelInput, replaced: Mapping[str, Tensor]) -> Tensor:
        """The raw output with some tensors replaced; call inside `borrowed(model)`."""
        fresh = {name: self.tensors[name].clone() for name in self.buffers}  # a forward pass may write into these
        install(self.model, {**self.tensors, **fresh, **replaced}, self.aliases)
        output = self._forward(x)
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor):
            raise InputTypeError(
                f"The model returned {type(output).__name__}; expected a tensor (B, C), (B, …, C) or (B,), or an "
                "object with `.logits`. Wrap the model so that its forward returns the outputs only."
            )
        return output

    def _forward(self, x: ModelInput) -> Any:
        try:
            return self.model(*x.args, **x.kwargs)
        except (LapwingError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(
                f"The model's own forward pass raised {type(error).__name__}: {error} "
                f"(it was called with {x.described()}). Check that the data are what the model was trained on."
            ) from error


def unwrapped(model: nn.Module) -> nn.Module:
    """The module behind torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", model)
        inner = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner
        if inner is model:
            return model
        model = inner


def with_images_in(x: ModelInput, layout: torch.memory_format) -> ModelInput:
    """The same values; tensors (n, channels, height, width) laid out in memory as told."""
    return x.mapped(lambda v: v.to(memory_format=layout) if _is_images(x, v) else v, x.n)


def _is_images(x: ModelInput, value: Any) -> bool:
    return x.batched(value) and value.ndim == 4 and value.is_floating_point()


def check_outputs(f: Tensor, n: int) -> tuple[int, ...]:
    """The shape of one datum's outputs, read off a batch of n; refuses what cannot be one row per datum."""
    if f.ndim == 0 or f.shape[0] != n:
        raise ShapeError(
            f"The model gave outputs of shape {tuple(f.shape)} for {n} inputs; expected the batch as first axis: "
            "(B, C), (B, …, C) or (B,)."
        )
    if not f.is_floating_point():
        raise InputError(f"The model's outputs have dtype {f.dtype}; expected real floating-point outputs (logits).")
    if not all_finite(f):
        raise InputError(
            "The model's outputs hold NaN or infinite values on the first batch; nothing can be linearised there."
        )
    if f.numel() == 0:
        raise ShapeError(f"The model gave no outputs: shape {tuple(f.shape)}.")
    return tuple(f.shape[1:])
