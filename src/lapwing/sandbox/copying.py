"""Copies of a tree of modules that share its tensors and whatever else is not part of the tree.

`copy.deepcopy` refuses or duplicates what a model may hold (locks, files, a trainer). Here modules and the containers
in them are made anew, and every reference to a module of the tree becomes one to its copy.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from copy import copy
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_ATOMS = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device, Tensor, nn.Parameter})
_CONTAINERS = frozenset({dict, list, set, OrderedDict})  # with a `copy` of their own


class Template:
    """A private copy of a model in eval mode, from which copies to run are made; nothing ever runs in it.

    It is the model as it was: later changes of the user's modules do not reach it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = _copies(model)
        self.model = self.modules[0]
        for module in self.modules:
            own = module.__dict__
            own["training"] = False
            if own.get("_compiled_call_impl") is not None:  # compiled for the user's module
                own["_compiled_call_impl"] = None
        self.fused = not all([_kept_plain(module) for module in self.modules])  # whether fused paths are still on
        self._held = {id(value) for module in self.modules for value in module.__dict__.values()}
        self._parts = _parts(self.modules, self._held)

    @classmethod
    def of(cls, model: nn.Module) -> Template | None:
        """None for a model that cannot be copied: one with TorchScript in it, for example."""
        if any(isinstance(m, torch.jit.ScriptModule) or "_orig_mod" in m._modules for m in model.modules()):
            return None
        try:
            return cls(model)
        except Exception:  # what a class may refuse is not known: its model is lent instead
            return None

    def copies(self) -> list[nn.Module]:
        """All modules of a copy, the model first."""
        copies = {id(module): object.__new__(type(module)) for module in self.modules}
        follow = _Follow(copies, self._held)
        for (module, containers, references), own in zip(self._parts, copies.values(), strict=True):
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
            object.__setattr__(own, "__dict__", module.__dict__.copy())


def _copies(model: nn.Module) -> list[nn.Module]:
    modules = list(model.modules())
    copies = {id(module): object.__new__(type(module)) for module in modules}
    follow = _Follow(copies, {id(value) for module in modules for value in module.__dict__.copy().values()})
    for module in modules:
        own = {key: follow(value) for key, value in module.__dict__.copy().items()}
        object.__setattr__(copies[id(module)], "__dict__", own)
        _copy_slots(module, copies[id(module)], follow)
    return list(copies.values())


def _copy_slots(module: nn.Module, own: nn.Module, follow: _Follow) -> None:
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
    follow = _Follow({id(module): nn.Module() for module in modules}, held)
    new = {id(v): follow(v) for module in modules for v in module.__dict__.values() if type(v) not in _ATOMS}
    parts = []
    for module in modules:
        containers: list[str] = []
        references: list[str] = []
        for key, value in module.__dict__.items():
            if new.get(id(value), value) is value:
                continue
            alone = type(value) in _CONTAINERS and follow.visits[id(value)] == 1
            (containers if alone and _same_items(value, new[id(value)]) else references).append(key)
        parts.append((module, containers, references))
    return parts


def _same_items(a: Any, b: Any) -> bool:
    return all(x is y for x, y in zip(_items(a), _items(b), strict=True))


def _items(container: Any) -> Iterator[Any]:
    return iter(container.values() if isinstance(container, dict) else container)


class _Follow:
    """Containers anew, and what refers to a module of the tree as the same that refers to its copy.

    Followed are lists, tuples, sets and dictionaries, bound methods, partial functions, closures, weak references and
    the handles of hooks. `held` are the attributes of modules: a container in a closure is copied if it is one of them.
    """

    def __init__(self, copies: Mapping[int, nn.Module], held: set[int] | frozenset[int] = frozenset()) -> None:
        self.copies, self.held = copies, held
        self.seen: dict[int, Any] = {}  # one copy of what is referred to several times
        self.visits: Counter[int] = Counter()

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if id(value) in self.copies:
            return self.copies[id(value)]
        if isinstance(value, dict | list | set):
            return self._container(value)
        if kind is tuple:
            parts = tuple(self(part) for part in value)
            return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
        if kind is MethodType:
            owner = self(value.__self__) if isinstance(value.__self__, nn.Module) else value.__self__
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is partial:
            return self._partial(value)
        if kind is FunctionType and value.__closure__:
            return self._closure(value)
        if kind is weakref.ref:
            return self._reference(value)
        if kind is RemovableHandle:
            return self._handle(value)
        return value

    def _container(self, value: Any) -> Any:
        self.visits[id(value)] += 1
        if id(value) in self.seen:
            return self.seen[id(value)]
        own = self.seen[id(value)] = value.copy() if type(value) in _CONTAINERS else copy(value)
        if isinstance(own, dict):
            for key, item in list(own.items()):
                if type(item) not in _ATOMS and (new := self(item)) is not item:
                    own[key] = new
        elif isinstance(own, list):
            own[:] = [self(item) for item in own]
        elif any(id(item) in self.copies for item in own):
            members = [self(item) for item in own]
            own.clear()
            own.update(members)
        return own

    def _partial(self, value: partial[Any]) -> Any:
        func, args = self(value.func), self(value.args)
        keywords = {key: self(item) for key, item in value.keywords.items()}
        if func is value.func and args is value.args and all(keywords[k] is v for k, v in value.keywords.items()):
            return value
        own = partial(func, *args, **keywords)
        own.__dict__.update(value.__dict__)
        return own

    def _closure(self, value: FunctionType) -> Any:
        if id(value) in self.seen:
            return self.seen[id(value)]
        self.seen[id(value)] = value  # should it refer to itself
        cells = tuple(self._cell(cell) for cell in value.__closure__ or ())
        if all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
            return value
        own = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        own.__kwdefaults__ = value.__kwdefaults__
        own.__dict__.update(value.__dict__)
        self.seen[id(value)] = own
        return own

    def _cell(self, cell: CellType) -> CellType:
        """Shared with the user's function if it holds nothing of the tree: a counter there goes on counting."""
        try:
            content = cell.cell_contents
        except ValueError:  # empty yet
            return cell
        if isinstance(content, dict | list | set) and id(content) not in self.held:
            return cell
        own = self(content)
        return cell if own is content else CellType(own)

    def _reference(self, value: weakref.ref[Any]) -> Any:
        target = value()
        own = self.copies.get(id(target), target)
        return value if own is target else weakref.ref(own)

    def _handle(self, value: RemovableHandle) -> RemovableHandle:
        """What removes a hook: of the copy, if the hook is."""
        of_tree = [ref() for ref in (value.hooks_dict_ref, *value.extra_dict_ref) if id(ref()) in self.held]
        if not of_tree:
            return value
        own = object.__new__(RemovableHandle)
        own.__dict__.update(value.__dict__)
        own.hooks_dict_ref, *extra = (
            weakref.ref(self(hooks)) if (hooks := ref()) is not None else ref
            for ref in (value.hooks_dict_ref, *value.extra_dict_ref)
        )
        own.extra_dict_ref = tuple(extra)
        return own


_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
_FUSED_FORWARDS = frozenset(kind.forward for kind in _FUSED)


def may_fuse(module: nn.Module) -> bool:
    """Whether it has a fused inference path, which skips submodules and fills padding differently."""
    return isinstance(module, _FUSED)


def _kept_plain(module: nn.Module) -> bool:
    """Turn the fused path of a private module off by its settings; False if that is not known to do."""
    if not may_fuse(module):
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
