"""Encode values as JSON nodes and named tensors, and decode them. Only types in a closed table are written or read.

None, true, 3, "word", 0.5     themselves; a float that is not finite is {"float": "inf"}
tuple                          a list
slice                          {"slice": [3, 7]}
tensor                         {"tensor": name}, with "order" if its axes have another order in memory
random generator               {"generator": its state, a tensor}
dataclass                      {"is": name in the table, "with": {field: node, …}}
constant                       {"constant": name in the table}
dictionary                     {"named": {name: node, …}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_type_hints

import torch
from torch import Tensor

from lapwing.errors import StorageError, StructureError
from lapwing.storage.container import can_hold
from lapwing.storage.hints import conforms

Node = Any  # any JSON value


@dataclass(frozen=True)
class Entry:
    """A type that files may hold: a dataclass, whose annotations define what its fields must be."""

    kind: type
    prepared: Callable[[Any], Any] = lambda value: value  # removes what must not be written
    check: Callable[[Any], None] = lambda value: None  # raises if fields are inconsistent
    on_host: bool = False  # whether its tensors stay on the CPU
    form: type | None = None  # type of `prepared`'s result, if it is another
    restored: Callable[[Any, torch.device], Any] = lambda value, device: value  # inverse of `prepared`


@dataclass(frozen=True)
class Table:
    """The closed list of types and constants that can be written and read, by name."""

    entries: Mapping[str, Entry]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, value: Any) -> str | None:
        return next((name for name, entry in self.entries.items() if type(value) is entry.kind), None)

    def constant_of(self, value: Any) -> str | None:
        return next((name for name, constant in self.constants.items() if value is constant), None)


@dataclass(eq=False)
class Encoder:
    """Encodes values and collects their tensors; a tensor shared by several values is written once."""

    table: Table
    tensors: dict[str, Tensor] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], tuple[Tensor, Node]] = field(default_factory=dict)

    def encode(self, value: Any, path: str) -> Node:
        """The JSON node of a value; tensors go to `tensors` under `path`."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            # x − x is NaN for infinities and NaN, which JSON does not have.
            return value if value - value == 0 else {"float": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop]}
        if isinstance(value, tuple | list):
            return [self.encode(item, f"{path}.{i}") for i, item in enumerate(value)]
        if isinstance(value, torch.Generator):
            return {"generator": self._tensor(value.get_state(), path)}
        if type(value) is dict:
            return {"named": {name: self.encode(item, f"{path}.{name}") for name, item in value.items()}}
        return self._object(value, path)

    def _object(self, value: Any, path: str) -> Node:
        constant, name = self.table.constant_of(value), self.table.name_of(value)
        if constant is not None:
            return {"constant": constant}
        if name is None:
            raise StructureError(
                f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: a file holds "
                f"only what it can be read back from, and that is a closed list ({', '.join(self.table.entries)})."
            )
        value = self.table.entries[name].prepared(value)
        with_ = {f.name: self.encode(getattr(value, f.name), f"{path}.{f.name}") for f in _stated(type(value))}
        return {"is": name, "with": with_}

    def _tensor(self, tensor: Tensor, path: str) -> Node:
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        # All empty tensors have address 0, so they cannot be distinguished by it.
        if tensor.numel() and key in self._known:
            return self._known[key][1]
        if not can_hold(tensor.dtype):
            raise StructureError(f"{path} is a tensor of {tensor.dtype}, which cannot be saved.")
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))
        node: Node = {"tensor": path}
        if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
            node["order"] = order
            tensor = tensor.permute(order)
        self.tensors[path] = tensor  # not copied here; if necessary, one at a time when written
        self._known[key] = tensor, node  # kept alive, so that its address is not reused
        return node


@dataclass(eq=False)
class Decoder:
    """Decodes nodes with the same table, and checks every value against the annotation of its field."""

    table: Table
    tensors: Mapping[str, Tensor]
    used: set[str] = field(default_factory=set)

    def decode(self, node: Node, device: torch.device) -> Any:
        """The value of a JSON node, with tensors on `device`."""
        if node is None or isinstance(node, bool | int | str | float):
            return node
        if isinstance(node, list):
            return tuple(self.decode(item, device) for item in node)
        kinds = {
            frozenset({"float"}): self._float,
            frozenset({"slice"}): self._slice,
            frozenset({"tensor"}): self._tensor,
            frozenset({"tensor", "order"}): self._tensor,
            frozenset({"generator"}): self._generator,
            frozenset({"constant"}): self._constant,
            frozenset({"named"}): self._named,
            frozenset({"is", "with"}): self._object,
        }
        # The exact set of keys decides: unknown keys are an error, not ignored.
        kind = kinds.get(frozenset(node))
        if kind is None:
            raise StorageError(f"unknown kind of node, with the keys {sorted(node)!s:.80}.")
        return kind(node, device)

    def check_all_used(self) -> None:
        unused = sorted(set(self.tensors) - self.used)
        if unused:
            raise StorageError(f"no value refers to tensor '{unused[0]:.80}'.")

    def _float(self, node: Node, device: torch.device) -> float:
        if node["float"] not in ("inf", "-inf", "nan"):
            raise StorageError(f"{node['float']!r:.40} is not a number.")
        return float(node["float"])

    def _slice(self, node: Node, device: torch.device) -> slice:
        ends = node["slice"]
        whole = isinstance(ends, list) and len(ends) == 2 and all(type(end) is int for end in ends)
        if not whole or not 0 <= ends[0] <= ends[1]:
            raise StorageError(f"{ends!s:.40} is not a slice.")
        return slice(*ends)

    def _tensor(self, node: Node, device: torch.device) -> Tensor:
        name = node["tensor"]
        if not isinstance(name, str) or name not in self.tensors:
            raise StorageError(f"there is no tensor {name!r:.80}.")
        self.used.add(name)
        tensor, order = self.tensors[name].to(device), node.get("order")
        if order is None:
            return tensor
        if not isinstance(order, list) or sorted(order) != list(range(tensor.ndim)):
            raise StorageError(f"tensor '{name:.80}' has no axes {order!s:.40}.")
        return tensor.permute([order.index(axis) for axis in range(tensor.ndim)])

    def _generator(self, node: Node, device: torch.device) -> torch.Generator:
        state = self.decode(node["generator"], torch.device("cpu"))
        generator = torch.Generator()
        generator.set_state(state)
        return generator

    def _constant(self, node: Node, device: torch.device) -> Any:
        return self.table.constants[self._known(node["constant"], self.table.constants)]

    def _named(self, node: Node, device: torch.device) -> dict[str, Any]:
        return {name: self.decode(item, device) for name, item in node["named"].items()}

    def _object(self, node: Node, device: torch.device) -> Any:
        """Build a dataclass after checking the names and types of all fields."""
        name = self._known(node["is"], self.table.entries)
        entry, given = self.table.entries[name], node["with"]
        kind = entry.form or entry.kind
        stated = {f.name: f for f in _stated(kind)}
        if not isinstance(given, dict) or not given.keys() <= stated.keys():
            raise StorageError(f"'{name}' has unknown fields: {sorted(given)!s:.80}.")
        missing = [f for f in stated.values() if f.name not in given and f.default is MISSING]
        if missing:
            raise StorageError(f"'{name}' lacks its field {missing[0].name}.")
        device = torch.device("cpu") if entry.on_host else device
        values = {field_: self.decode(item, device) for field_, item in given.items()}
        hints = get_type_hints(kind)
        for field_, value in values.items():
            if not conforms(value, hints[field_]):
                raise StorageError(f"'{name}' has a {field_} that is not {hints[field_]}.")
        made = kind(**values)
        entry.check(made)
        return entry.restored(made, device)

    def _known(self, name: Node, known: Mapping[str, Any]) -> str:
        if not isinstance(name, str) or name not in known:
            raise StorageError(f"{name!r:.80} is not among what can be read: {', '.join(known)}.")
        return name


def _stated(kind: type) -> list[Field[Any]]:
    return [f for f in fields(kind) if f.init]
