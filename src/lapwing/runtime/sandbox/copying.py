"""Copies of a tree of modules that share its tensors and whatever else is not part of the tree.

`copy.deepcopy` refuses or duplicates what a model may hold (locks, files, a trainer). Here modules and the containers
in them are made anew, and every reference to a module of the tree becomes one to its copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from types import MemberDescriptorType
from typing import Any

import torch
from torch import nn

from lapwing.runtime.sandbox.following import ATOMS, CONTAINERS, Follow

_script = threading.RLock()


class Template:
    """A private copy of a model in eval mode, from which copies to run are made; nothing ever runs in it.

    It is the model as it was: later changes of the user's modules do not reach it. TorchScript in it is copied once,
    with its tensors, and run by one thread at a time.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = _copies(model)
        self.model = self.modules[0]
        self.scripted = [module for module in self.modules if is_script(module)]
        for module in self.modules:
            if is_script(module):
                module.eval()
                continue
            own = module.__dict__
            own["training"] = False
            if own.get("_compiled_call_impl") is not None:  # compiled for the user's module
                own["_compiled_call_impl"] = None
        self.fused = not all([_kept_plain(module) for module in self.modules])  # whether fused paths are still on
        self._held = {id(value) for module in self.modules for value in module.__dict__.values()}
        self._parts = _parts(self.modules, self._held)

    @classmethod
    def of(cls, model: nn.Module) -> Template | None:
        """None for a model that cannot be copied: one with compiled modules in it, for example."""
        if any("_orig_mod" in m._modules for m in model.modules()):
            return None
        try:
            return cls(model)
        except Exception:  # what a class may refuse is not known: its model is lent instead
            return None

    def __reduce__(self) -> tuple[type[Template], tuple[nn.Module]]:
        return Template, (self.model,)

    def copies(self) -> list[nn.Module]:
        """All modules of a copy, the model first."""
        copies = {id(m): m if is_script(m) else object.__new__(type(m)) for m in self.modules}
        follow = Follow(copies, self._held)
        for module, containers, references in self._parts:
            own = copies[id(module)]
            attributes = module.__dict__.copy()
            for key in containers:
                attributes[key] = attributes[key].copy()
            for key in references:
                attributes[key] = follow(attributes[key])
            object.__setattr__(own, "__dict__", attributes)
            _copy_slots(module, own, follow)
        return list(copies.values())

    def clear(self, copies: list[nn.Module]) -> None:
        """Take out of a copy what its run left there, so that no graph waits for the garbage collector.

        Blocks of the Jacobian that are formed later read the settings of their layer: these stay.
        """
        for module, own in zip(self.modules, copies, strict=True):
            if own is not module:
                object.__setattr__(own, "__dict__", module.__dict__.copy())

    @contextmanager
    def script_kept(self) -> Iterator[None]:
        """Around a run: what all runs share is used by one, and has its tensors back afterwards."""
        with _script if self.scripted else nullcontext(), script_tensors_kept(self.scripted):
            yield


def is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


@contextmanager
def script_tensors_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """TorchScript keeps mode and tensors where `__dict__` does not show them."""
    scripted = [module for module in modules if is_script(module)]
    modes = [module.training for module in scripted]
    saved = [(slots, list(slots.items())) for m in scripted for slots in (m._parameters, m._buffers)]
    try:
        yield
    finally:
        for module, mode in zip(scripted, modes, strict=True):
            module.training = mode
        for slots, tensors in saved:
            for key, tensor in tensors:
                slots[key] = tensor  # type: ignore[assignment]


def _copies(model: nn.Module) -> list[nn.Module]:
    modules = list(model.modules())
    copies: dict[int, nn.Module] = {}
    for module in modules:
        if is_script(module) and id(module) not in copies:
            copies |= zip(map(id, module.modules()), deepcopy(module).modules(), strict=True)
        elif id(module) not in copies:
            copies[id(module)] = object.__new__(type(module))
    follow = Follow(copies, {id(value) for module in modules for value in module.__dict__.copy().values()})
    for module in modules:
        if is_script(module):
            continue
        own = {key: follow(value) for key, value in module.__dict__.copy().items()}
        object.__setattr__(copies[id(module)], "__dict__", own)
        _copy_slots(module, copies[id(module)], follow)
    return list(copies.values())


def _copy_slots(module: nn.Module, own: nn.Module, follow: Follow) -> None:
    for name in _slots(type(module)):
        if hasattr(module, name):
            object.__setattr__(own, name, follow(getattr(module, name)))


def _slots(kind: type) -> list[str]:
    if kind not in _slots_of:
        members = [(name, member) for base in kind.__mro__[:-1] for name, member in vars(base).items()]
        _slots_of[kind] = [name for name, member in members if type(member) is MemberDescriptorType]
    return _slots_of[kind]


_slots_of: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _parts(modules: list[nn.Module], held: set[int]) -> list[tuple[nn.Module, list[str], list[str]]]:
    """Of every module, the attributes that are containers to copy as they are, and those that have to be followed."""
    follow = Follow({id(module): nn.Module() for module in modules}, held)
    new = {id(v): follow(v) for module in modules for v in module.__dict__.values() if type(v) not in ATOMS}
    parts = []
    for module in modules:
        if is_script(module):
            continue
        containers: list[str] = []
        references: list[str] = []
        for key, value in module.__dict__.items():
            if new.get(id(value), value) is value:
                continue
            alone = type(value) in CONTAINERS and follow.visits[id(value)] == 1
            (containers if alone and _same_items(value, new[id(value)]) else references).append(key)
        parts.append((module, containers, references))
    return parts


def _same_items(a: Any, b: Any) -> bool:
    return all(x is y for x, y in zip(_items(a), _items(b), strict=True))


def _items(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)


_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_FUSED_FORWARDS = frozenset(kind.forward for kind in _FUSED)


def may_fuse(module: nn.Module) -> bool:
    """Whether it has a fused inference path, which skips submodules and fills padding differently."""
    return isinstance(module, _FUSED)


def _kept_plain(module: nn.Module) -> bool:
    """Turn the fused path of a private module off by its settings; False if that is not known to do."""
    if is_script(module) or not may_fuse(module):
        return True
    if type(module).forward not in _FUSED_FORWARDS:
        return False
    own = module.__dict__
    if isinstance(module, nn.MultiheadAttention):
        own["training"], own["dropout"] = True, 0.0  # the slow path without dropout is that of eval mode
    elif isinstance(module, nn.TransformerEncoderLayer):
        own["activation_relu_or_gelu"] = 0  # only the fused path asks
    else:
        own["use_nested_tensor"] = False
    return True
