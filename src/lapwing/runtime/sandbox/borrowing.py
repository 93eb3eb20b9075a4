"""Borrow the user's model without leaving a trace.

Calls run in a copy of the modules that lives as long as the call, so hooks, installed tensors and whatever a forward
pass writes into its modules are seen by that call alone. A model that cannot be copied is itself lent, to one thread
at a time, and put back afterwards. What a forward pass does outside its modules (a file it writes, a list a hook keeps
elsewhere) cannot be undone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lapwing.runtime.sandbox.copying import Template, may_fuse, script_tensors_kept
from lapwing.runtime.sandbox.process import draws_undone, plain_computing
from lapwing.runtime.sandbox.watching import Unfused

_lending = threading.RLock()  # one for all models: two of them may have modules in common


@contextmanager
def borrowed(model: Template | nn.Module, *, draws: bool = True) -> Iterator[nn.Module]:
    """Modules to evaluate, hook and install tensors in, in eval mode, with gradients on; they are valid inside."""
    with _copied(model) if isinstance(model, Template) else _lent(model) as own:
        fused = model.fused if isinstance(model, Template) else any(may_fuse(module) for module in own.modules())
        with draws_undone(draws=draws), plain_computing(), Unfused() if fused else nullcontext():
            yield own


@contextmanager
def _copied(template: Template) -> Iterator[nn.Module]:
    with template.script_kept():
        copies = template.copies()
        try:
            yield copies[0]
        finally:
            template.clear(copies)


@contextmanager
def _lent(model: nn.Module) -> Iterator[nn.Module]:
    with _lending, _attributes_kept(model), script_tensors_kept(model.modules()):
        for module in model.modules():
            module.training = False
        yield model


def install(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Let a borrowed model compute with these tensors in place of its own parameters and buffers.

    They stay in place until the model is given back, so a checkpointed block that recomputes itself during the
    backward pass sees them too. `aliases` maps every name of a shared tensor to the one it is listed under. A buffer
    that has none was made by a forward pass, as a mask is on first use: it stays until then as well.
    """
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for slots in (module._parameters, module._buffers):
            for key, current in slots.items():
                if current is not None and prefix + key in aliases:
                    slots[key] = tensors[aliases[prefix + key]]
        if isinstance(module, nn.RNNBase):  # recurrent layers read their weights from a list of their own
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    # Shallow copies of every module's attributes, and of the containers among them (hooks, buffers, children, logs):
    # old-style weight_norm, caches and counters all write there during a forward pass.
    saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, list[Any]]]]] = []
    for module in model.modules():
        attributes = dict(module.__dict__)
        containers = [(v, _items(v)) for v in attributes.values() if isinstance(v, dict | list | set)]
        saved.append((module, attributes, containers))
    try:
        yield
    finally:
        for module, attributes, containers in saved:
            module.__dict__.update(attributes)  # before anything is taken out: no attribute is ever missing
            for key in module.__dict__.keys() - attributes.keys():
                del module.__dict__[key]
            for container, content in containers:
                if container or content:  # most are hooks, and there are none
                    _refill(container, content)


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _refill(container: Any, content: list[Any]) -> None:
    """Put the content back if it has changed."""
    now = _items(container)
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
