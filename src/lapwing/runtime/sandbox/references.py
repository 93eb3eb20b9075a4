"""Redirect references to the modules of a tree to the copies of those modules."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from copy import copy
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

ATOMS = frozenset({bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device, Tensor, nn.Parameter})
CONTAINERS = frozenset({dict, list, set, OrderedDict})  # their `copy` method makes a shallow copy


class ReferenceMapper:
    """Maps a value to one that refers to the copied modules; a value without such references is returned unchanged.

    Handles lists, tuples, sets, dictionaries, bound methods, partial functions, closures, weak references and handles
    of hooks. Containers are always copied, except in closures: there only if they are an attribute of a module, whose
    ids are `held`.
    """

    def __init__(self, copies: Mapping[int, nn.Module], held: set[int] | frozenset[int] = frozenset()) -> None:
        self.copies, self.held = copies, held
        self.seen: dict[int, Any] = {}  # id → copy: shared containers stay shared, cycles end
        self.visits: Counter[int] = Counter()  # how often each container is referred to

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
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
        own = self.seen[id(value)] = value.copy() if type(value) in CONTAINERS else copy(value)
        if isinstance(own, dict):
            for key, item in list(own.items()):
                if type(item) not in ATOMS and (new := self(item)) is not item:
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
        own.__dict__.update(value.__dict__)  # partial objects may have attributes
        return own

    def _closure(self, value: FunctionType) -> Any:
        if id(value) in self.seen:
            return self.seen[id(value)]
        self.seen[id(value)] = value  # ends the recursion if the closure refers to itself
        cells = tuple(self._cell(cell) for cell in value.__closure__ or ())
        if all(a is b for a, b in zip(cells, value.__closure__ or (), strict=True)):
            return value
        own = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        own.__kwdefaults__ = value.__kwdefaults__
        own.__dict__.update(value.__dict__)
        self.seen[id(value)] = own
        return own

    def _cell(self, cell: CellType) -> CellType:
        """A new cell if its content refers to the tree; otherwise the user's own, so that counters keep working."""
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
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
        """A handle that removes the hook from the copied module instead of the user's."""
        of_tree = [ref() for ref in (value.hooks_dict_ref, *value.extra_dict_ref) if id(ref()) in self.held]
        if not of_tree:
            return value
        own = object.__new__(RemovableHandle)  # its constructor would take a new hook id
        own.__dict__.update(value.__dict__)
        own.hooks_dict_ref, *extra = (
            weakref.ref(self(hooks)) if (hooks := ref()) is not None else ref
            for ref in (value.hooks_dict_ref, *value.extra_dict_ref)
        )
        own.extra_dict_ref = tuple(extra)
        return own
