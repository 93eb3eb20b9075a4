"""The user's module as a pure function of inputs and parameters."""

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

_FEW = 3  # data for the rule check: rarely equal to another axis length, so a transposed batch axis is detected


@dataclass(frozen=True)
class Traits:
    """Properties found by a trial run of the network; before it, the conservative assumption."""

    lent: bool = False  # the user's own modules are run, as a copy would compute with the user's tensors
    draws: bool = True  # draws random numbers in eval mode
    attends: bool = True  # calls torch's attention functions


@dataclass(frozen=True, eq=False)
class Network:
    """A private copy of the user's module and its tensors, a pure function f(x; θ).

    If the module cannot be copied, the user's own is used, under a lock, and restored after each call.
    """

    model: nn.Module
    tensors: Mapping[str, Tensor]  # copies of all parameters and buffers
    aliases: Mapping[str, str]  # every name of a tensor → the name it is listed under; they differ for tied tensors
    buffers: frozenset[str]
    template: Template | None = None  # None: the user's own module is run
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
        """The network on a private copy of the module, unless `traits.lent`."""
        template = None if traits.lent else Template.of(self.model)
        if template is None:
            return replace(self, traits=replace(traits, lent=True))
        return replace(self, model=template.model, template=template, traits=traits)

    @classmethod
    def tried(cls, model: nn.Module, x: ModelInput) -> tuple[Network, ModelInput, Tensor]:
        """Run the network on the first few inputs; returns network with traits, these inputs, and the output.

        A model that reaches its own modules or tensors in a way the copy does not cover (a global variable, an object
        outside the module tree) is detected here, and run itself under a lock from then on.
        """
        network = cls.of(model)
        # The first rows in order, as sequences may be sorted by length; a smaller batch repeats its last row.
        few = network.placed(x.rows(torch.arange(_FEW).clamp(max=x.n - 1)))
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
        """Context with the network on modules that are private to this call."""
        with borrowed(self.template or self.model, draws=self.traits.draws) as model:
            yield replace(self, model=model)

    def plain_attention(self) -> AbstractContextManager[Any]:
        """Context for second derivatives and forward-mode AD: attention by its formula instead of fused kernels."""
        return MathAttention() if self.traits.attends else nullcontext()

    def placed(self, x: ModelInput) -> ModelInput:
        """Inputs on the model's device; floating-point tensors in the model's dtype."""

        return placed(x, self.device, self.dtype)

    def __call__(self, x: ModelInput, replaced: Mapping[str, Tensor]) -> Tensor:
        """The model's raw output with some tensors replaced; call it on a borrowed network only."""
        # A forward pass may write to buffers (counters, caches): give each run its own copies.
        fresh = {name: self.tensors[name].clone() for name in self.buffers}
        install(self.model, {**self.tensors, **fresh, **replaced}, self.aliases)
        return called(self.model, x)


def placed(x: ModelInput, device: torch.device, dtype: torch.dtype | None) -> ModelInput:
    """Inputs on a device; floating-point ones in a dtype, where there is one."""

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own = dtype if value.is_floating_point() and dtype is not None else value.dtype
        moved = (value if x.attached else value.detach()).to(device, own)
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
    """The output tensor of a model: the return value itself, its `logits`, or the single entry of a tuple."""
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
    """A hint if a mapping batch has columns that the model's forward does not accept."""
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
    """The inputs with image tensors (n, channels, height, width) in the given memory format."""
    return x.mapped(lambda v: v.to(memory_format=layout) if _is_images(x, v) else v, x.n)


def _is_images(x: ModelInput, value: Any) -> bool:
    return x.batched(value) and value.ndim == 4 and value.is_floating_point()


def check_outputs(f: Tensor, n: int) -> tuple[int, ...]:
    """The output shape of one datum, from the outputs of a batch of n; raises if the first axis is not the batch."""
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
    """Raise unless `model` is an instance of nn.Module."""
    if isinstance(model, nn.Module):
        return
    came, cure = other_libraries.model_hint(model)
    raise InputTypeError(
        f"{function}: expected the model, a trained torch.nn.Module, got {came}.{f' {cure}.' if cure else ''}"
    )
