"""Structural copies of a module tree: new modules and containers that share the tensors and all other objects.

`copy.deepcopy` fails on objects that a model may hold (locks, open files) or duplicates them (a trainer, the weights).
Here only modules and their containers are copied, and references between modules of the tree are redirected to the
copies.
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

from lapwing.runtime.sandbox.references import ATOMS, CONTAINERS, ReferenceMapper

_script_lock = threading.RLock()


class Template:
    """A private copy of a model in eval mode. It is never run itself; every run takes a new copy of it.

    Changes that the user makes to the modules later do not affect it. TorchScript modules cannot be copied
    structurally: they are deep-copied once, with their tensors, and one thread runs them at a time.
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
            if own.get("_compiled_call_impl") is not None:  # by module.compile(); it would run the user's module
                own["_compiled_call_impl"] = None
        # A list, not a generator: every module is to be changed, also after the first that cannot be.
        self.fused = not all([_disable_fused_path(module) for module in self.modules])
        self._held = {id(value) for module in self.modules for value in module.__dict__.values()}
        self._parts = _parts(self.modules, self._held)

    @classmethod
    def of(cls, model: nn.Module) -> Template | None:
        """A template, or None for a model that cannot be copied, such as one with `torch.compile`d modules."""
        if any("_orig_mod" in m._modules for m in model.modules()):
            return None
        try:
            return cls(model)
        except Exception:  # user classes may raise anything when copied; the model is then run itself, under a lock
            return None

    def __reduce__(self) -> tuple[type[Template], tuple[nn.Module]]:
        return Template, (self.model,)

    def copies(self) -> list[nn.Module]:
        """A new copy as the list of its modules, the root first.

        Which attributes hold references was found once, in `_parts`: a copy takes microseconds per module.
        """
        # object.__new__: __init__ would need arguments and allocate new tensors.
        copies = {id(m): m if is_script(m) else object.__new__(type(m)) for m in self.modules}
        follow = ReferenceMapper(copies, self._held)
        for module, containers, references in self._parts:
            own = copies[id(module)]
            attributes = module.__dict__.copy()
            for key in containers:
                attributes[key] = attributes[key].copy()
            for key in references:
                attributes[key] = follow(attributes[key])
            object.__setattr__(own, "__dict__", attributes)  # past nn.Module.__setattr__, which registers tensors
            _copy_slots(module, own, follow)
        return list(copies.values())

    def clear(self, copies: list[nn.Module]) -> None:
        """Drop what a run stored in its copy, which frees the autograd graph without waiting for the garbage collector.

        The original attributes stay: Jacobian blocks that are evaluated later read stride, padding etc. of their layer.
        """
        for module, own in zip(self.modules, copies, strict=True):
            if own is not module:
                object.__setattr__(own, "__dict__", module.__dict__.copy())

    @contextmanager
    def script_locked(self) -> Iterator[None]:
        """Lock the TorchScript modules, which all copies share, during a run, and restore their tensors afterwards."""
        with _script_lock if self.scripted else nullcontext(), script_tensors_restored(self.scripted):
            yield


def is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


@contextmanager
def script_tensors_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore mode and tensors of TorchScript modules, which live in C++ and not in `__dict__`."""
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
    """Structural copies of all modules of the tree, TorchScript modules as deep copies."""
    modules = list(model.modules())
    copies: dict[int, nn.Module] = {}
    for module in modules:
        if is_script(module) and id(module) not in copies:
            copies |= zip(map(id, module.modules()), deepcopy(module).modules(), strict=True)
        elif id(module) not in copies:
            copies[id(module)] = object.__new__(type(module))
    # __dict__.copy(): another thread may run the user's model now, and add attributes while we iterate.
    follow = ReferenceMapper(copies, {id(value) for module in modules for value in module.__dict__.copy().values()})
    for module in modules:
        if is_script(module):
            continue
        own = {key: follow(value) for key, value in module.__dict__.copy().items()}
        object.__setattr__(copies[id(module)], "__dict__", own)
        _copy_slots(module, copies[id(module)], follow)
    return list(copies.values())


def _copy_slots(module: nn.Module, own: nn.Module, follow: ReferenceMapper) -> None:
    """Copy attributes declared in `__slots__`, which are not in `__dict__`."""
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
    """For every module: attributes that are containers to copy shallowly, and attributes that refer to modules.

    Found by a trial run of the reference mapper on placeholder modules.
    """
    follow = ReferenceMapper({id(module): nn.Module() for module in modules}, held)
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
            # A container that two attributes share must stay shared in the copy: leave it to the reference mapper.
            unshared = type(value) in CONTAINERS and follow.visits[id(value)] == 1
            (containers if unshared and _same_items(value, new[id(value)]) else references).append(key)
        parts.append((module, containers, references))
    return parts


def _same_items(a: Any, b: Any) -> bool:
    return all(x is y for x, y in zip(_items(a), _items(b), strict=True))


def _items(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)


_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_FUSED_FORWARDS = frozenset(kind.forward for kind in _FUSED)


def has_fused_path(module: nn.Module) -> bool:
    """Whether torch may take the fused inference path: it skips submodules and their hooks, and treats padding
    differently."""
    return isinstance(module, _FUSED)


def _disable_fused_path(module: nn.Module) -> bool:
    """Disable the fused inference path of a copy through its attributes; False if a subclass overrides `forward`."""
    if is_script(module) or not has_fused_path(module):
        return True
    if type(module).forward not in _FUSED_FORWARDS:
        return False
    own = module.__dict__
    if isinstance(module, nn.MultiheadAttention):
        own["training"], own["dropout"] = True, 0.0  # training mode without dropout computes the same as eval mode
    elif isinstance(module, nn.TransformerEncoderLayer):
        own["activation_relu_or_gelu"] = 0  # read by the fused path only; 0 means "not supported there"
    else:
        own["use_nested_tensor"] = False
    return True
