"""The user's module as a pure function of its inputs and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lapwing._types import Tensor
from lapwing.data import ModelInput, other_libraries
from lapwing.errors import InputError, InputTypeError, LapwingError, ModelError, ShapeError
from lapwing.linalg import all_finite
from lapwing.runtime.sandbox import (
    MathAttention,
    Template,
    UseOfTensors,
    borrowed,
    install,
    random_states,
    same_states,
)

_FEW = 3  # data: an odd number that rarely equals a sequence length; equality is still caught by the probe's numbers


@dataclass(frozen=True)
class Traits:
    """What a run of the network showed; of one that has not been run, the worst."""

    lent: bool = False  # it computes with the user's own tensors when copied
    draws: bool = True  # it draws random numbers in eval mode
    attends: bool = True  # it calls torch's attention


@dataclass(frozen=True, eq=False)
class Network:
    """A private copy of the user's module and its tensors: a pure function of (x, θ).

    A module that cannot be copied is the user's own, which is lent for each call.
    """

    model: nn.Module
    tensors: Mapping[str, Tensor]  # parameters and buffers as they were
    aliases: Mapping[str, str]
    buffers: frozenset[str]
    template: Template | None = None  # None: the model is lent
    traits: Traits = Traits()

    @classmethod
    def of(cls, model: nn.Module) -> Network:
        return cls.lent(model).with_traits(Traits())

    @classmethod
    def lent(cls, model: nn.Module) -> Network:
        listed: dict[int, str] = {}
        aliases: dict[str, str] = {}
        tensors: dict[str, Tensor] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            aliases[name] = listed.setdefault(id(tensor), name)
            if aliases[name] == name:
                tensors[name] = tensor.detach().clone()
        parameters = {name for name, _ in model.named_parameters()}
        buffers = frozenset(set(tensors) - parameters)
        return cls(model, tensors, aliases, buffers, traits=Traits(lent=True))

    def with_traits(self, traits: Traits) -> Network:
        """Of a network that is lent: on a private copy of the module, unless it has to be lent."""
        template = None if traits.lent else Template.of(self.model)
        if template is None:
            return replace(self, traits=replace(traits, lent=True))
        return replace(self, model=template.model, template=template, traits=traits)

    @classmethod
    def tried(cls, model: nn.Module, x: ModelInput) -> tuple[Network, ModelInput, Tensor]:
        """The network after a run on the first of these inputs, these few, and the output.

        A model that reaches its own modules or tensors in a way the copy cannot follow is lent.
        """
        network = cls.of(model)
        few = network.placed(x.rows(torch.arange(_FEW).clamp(max=x.n - 1)))  # in their order, which it may rely on
        try:
            network, output, escaped = network._seen_on(few, [*model.parameters(), *model.buffers()])
        except ModelError:
            escaped = True
        if escaped and not network.traits.lent:
            network, output, _ = cls.lent(model)._seen_on(few, [])
        return network, few, output

    def _seen_on(self, few: ModelInput, originals: list[Tensor]) -> tuple[Network, Tensor, bool]:
        with self.borrowed() as own, torch.no_grad(), UseOfTensors(originals) as use:
            before = random_states()
            output = own(few, {})
            draws = not same_states(before, random_states())
        return replace(self, traits=replace(self.traits, draws=draws, attends=use.attends)), output, use.used

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all floating-point parameters, or None when they differ."""
        dtypes = {t.dtype for n, t in self.tensors.items() if n not in self.buffers and t.is_floating_point()}
        return dtypes.pop() if len(dtypes) == 1 else None

    @cached_property
    def device(self) -> torch.device:
        return next(t.device for n, t in self.tensors.items() if n not in self.buffers)

    @contextmanager
    def borrowed(self) -> Iterator[Network]:
        """The same on modules that are this call's alone, to be run inside."""
        with borrowed(self.template or self.model, draws=self.traits.draws) as model:
            yield replace(self, model=model)

    def plain_attention(self) -> AbstractContextManager[Any]:
        """Attention by its plain formula, which has second and forward-mode derivatives, in this thread."""
        return MathAttention() if self.traits.attends else nullcontext()

    def placed(self, x: ModelInput) -> ModelInput:
        """Inputs on the model's device; floating-point ones in the model's dtype."""

        return placed(x, self.device, self.dtype)

    def __call__(self, x: ModelInput, replaced: Mapping[str, Tensor]) -> Tensor:
        """The raw output with some tensors replaced; of a borrowed network only."""
        fresh = {name: self.tensors[name].clone() for name in self.buffers}  # a forward pass may write into these
        install(self.model, {**self.tensors, **fresh, **replaced}, self.aliases)
        return called(self.model, x)


def placed(x: ModelInput, device: torch.device, dtype: torch.dtype | None) -> ModelInput:
    """Inputs on a device; floating-point ones in a dtype, where there is one."""

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.detach().to(device, dtype if value.is_floating_point() and dtype is not None else value.dtype)
        return moved.clone() if moved.is_inference() else moved

    return x.mapped(place, x.n)


def called(model: nn.Module, x: ModelInput) -> Tensor:
    """The outputs of a module as it is; errors of its own forward pass say so."""
    try:
        output = model(*x.args, **x.kwargs)
    except (LapwingError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"The model's own forward pass raised {type(error).__name__}: {error} "
            f"(it was called with {x.described()}). Check that the data are what the model was trained on."
            f"{_no_forward_advice(error) or x.advice() or _columns_advice(error, x)}"
        ) from error
    return _logits(output)


def _logits(output: Any) -> Tensor:
    """The outputs among what a model returns: itself, its `logits`, or the one entry of a tuple."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(found, tuple) and len(found) == 1:
        found = found[0]
    if isinstance(found, Tensor):
        return found
    what = type(output).__name__
    if isinstance(output, Mapping):
        what += f" with the keys {', '.join(map(repr, output)) or 'none'}"
    elif isinstance(output, tuple):
        what += f" of {len(output)}"
    raise InputTypeError(
        f"The model returned {what}; expected a tensor (B, C), (B, …, C) or (B,), or an object with `.logits` or a "
        "mapping with 'logits'. Wrap the model so that its forward returns the outputs only."
    )


def _no_forward_advice(error: Exception) -> str:
    """What to do about a module without a forward pass, as a LightningModule may be."""
    if not isinstance(error, NotImplementedError) or "forward" not in str(error):
        return ""
    return " Define forward(self, x), or pass the network that the module holds."


def _columns_advice(error: Exception, x: ModelInput) -> str:
    """What to do about columns that are no arguments of the model."""
    if not isinstance(error, TypeError) or not x.kwargs:
        return ""
    return " Mapping batches go to the model as keyword arguments; inputs= names the columns that are inputs."


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


def check_module(function: str, model: Any) -> None:
    """The first argument must be a module: not its class, not a function."""
    if isinstance(model, nn.Module):
        return
    came, cure = other_libraries.model_hint(model)
    raise InputTypeError(
        f"{function}: expected the model, a trained torch.nn.Module, got {came}.{f' {cure}.' if cure else ''}"
    )
