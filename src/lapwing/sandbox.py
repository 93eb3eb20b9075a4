"""Borrow the user's model without leaving a trace.

Inside `borrowed(model)` the model is in eval mode, its fused inference paths are off (they skip submodules and
fill padding differently), gradients are on, and only one thread uses it. Afterwards every module has the
attributes, hooks and modes it had, and the global random states are what they were. What a forward pass does
outside its modules (a file it writes, a list a hook keeps elsewhere) cannot be undone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Evaluate the model freely inside; find it untouched outside, whatever happened."""
    with _lock_of(model), random_state_kept(), _attributes_kept(model), ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(_fast_path.off())
        for module in model.modules():
            module.training = False
        yield


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Inside `torch.inference_mode`, make tensors that autograd can use later on; elsewhere change nothing."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


class _FastPath:
    """The process-wide switch of fused attention: the first borrower turns it off, the last one back."""

    def __init__(self) -> None:
        self.guard, self.borrowers, self.before = threading.Lock(), 0, True

    @contextmanager
    def off(self) -> Iterator[None]:
        with self.guard:
            if not self.borrowers:
                self.before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.borrowers += 1
        try:
            yield
        finally:
            with self.guard:
                self.borrowers -= 1
                if not self.borrowers:
                    torch.backends.mha.set_fastpath_enabled(self.before)


_fast_path = _FastPath()


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give torch's, NumPy's and Python's global random states back as they were."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    legacy, python = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(legacy)
        random.setstate(python)


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
            module.__dict__.clear()
            module.__dict__.update(attributes)
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


def _lock_of(model: nn.Module) -> threading.RLock:
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())
