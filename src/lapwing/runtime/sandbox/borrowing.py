"""Run the user's model without side effects on its modules.

Each call runs in its own structural copy of the modules, which shares their tensors. Hooks, installed tensors and
attributes that the forward pass writes therefore stay private to the call, and threads do not interfere. A model that
cannot be copied is run itself, by one thread at a time under a lock, and all its attributes are restored afterwards.
Side effects outside the modules (a file that the forward pass writes, a list in a hook's closure) cannot be undone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lapwing.runtime.sandbox.copying import Template, has_fused_path, script_tensors_restored
from lapwing.runtime.sandbox.process import grad_mode, rng_restored
from lapwing.runtime.sandbox.watching import Unfused

_shared_model_lock = threading.RLock()  # one for all models: two models may share modules


@contextmanager
def borrowed(model: Template | nn.Module, *, draws: bool = True) -> Iterator[nn.Module]:
    """Context with modules that may be run, hooked and given other tensors: in eval mode, with gradients enabled.

    Do not use the modules after the context exits. `draws` says whether the model draws random numbers in eval mode.
    """
    with _copied(model) if isinstance(model, Template) else _locked(model) as own:
        fused = model.fused if isinstance(model, Template) else any(has_fused_path(module) for module in own.modules())
        with rng_restored(draws=draws), grad_mode(), Unfused() if fused else nullcontext():
            yield own


@contextmanager
def _copied(template: Template) -> Iterator[nn.Module]:
    with template.script_locked():
        copies = template.copies()
        try:
            yield copies[0]
        finally:
            template.clear(copies)


@contextmanager
def _locked(model: nn.Module) -> Iterator[nn.Module]:
    """The user's own modules in eval mode, under a lock; all their attributes are restored on exit."""
    with _shared_model_lock, _attributes_restored(model), script_tensors_restored(model.modules()):
        for module in model.modules():
            module.training = False  # not module.eval(), which a subclass may override
        yield model


def install(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Replace parameters and buffers of a borrowed model by `tensors`, until the context of `borrowed` exits.

    Unlike `torch.func.functional_call` this covers the backward pass too, where activation checkpointing recomputes
    the forward pass. `aliases` maps every name of a tied tensor to the name it is listed under. Buffers without an
    alias were created by a forward pass (a mask cached on first use) and are left in place.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for slots in (module._parameters, module._buffers):
            for key, current in slots.items():
                if current is not None and prefix + key in aliases:
                    slots[key] = tensors[aliases[prefix + key]]
        if isinstance(module, nn.RNNBase):  # RNN layers read their weights from the list `_flat_weights`
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


@contextmanager
def _attributes_restored(model: nn.Module) -> Iterator[None]:
    # Shallow copies of every module's __dict__ and of the containers in it (hooks, buffers, children, lists):
    # old-style weight_norm, caches and counters write there during a forward pass.
    saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, list[Any]]]]] = []
    for module in model.modules():
        attributes = dict(module.__dict__)
        containers = [(v, _items(v)) for v in attributes.values() if isinstance(v, dict | list | set)]
        saved.append((module, attributes, containers))
    try:
        yield
    finally:
        for module, attributes, containers in saved:
            # Update before deleting, so that no attribute is missing in between if another thread reads the module.
            module.__dict__.update(attributes)
            for key in module.__dict__.keys() - attributes.keys():
                del module.__dict__[key]
            for container, content in containers:
                if container or content:  # most are empty dictionaries of hooks
                    _restore(container, content)


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _restore(container: Any, content: list[Any]) -> None:
    """Restore the content if it has changed; an unchanged container is not written to."""
    now = _items(container)
    # Compare by identity: == of tensors is elementwise.
    pairs = zip(now, content, strict=False)
    if isinstance(container, dict):
        same = all(k is old_k and v is old_v for (k, v), (old_k, old_v) in pairs)
    else:
        same = all(a is b for a, b in pairs)
    if same and len(now) == len(content):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
