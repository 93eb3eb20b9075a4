"""Convert the state_dict of an optimizer or schedule into values that a file can hold, and back.

Mappings become lists of pairs, because their keys can be of any type while files allow strings only. Types of
sequences and counters are preserved.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from lapwing.errors import StorageError

_MAPPINGS: dict[str, type] = {"dict": dict, "counter": Counter, "ordered": OrderedDict}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "deque": deque}


def as_nodes(value: Any, where: str = "state") -> Any:
    """Nested dictionaries and lists of tensors and numbers."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    if isinstance(value, Real):  # a NumPy scalar
        return float(value)
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "ordered" if isinstance(value, OrderedDict) else "dict"
        # The default factory is a function, which a file cannot hold.
        if isinstance(value, defaultdict):
            kind = "dict"
        return {kind: [[as_nodes(k, where), as_nodes(v, f"{where}.{k}")] for k, v in value.items()]}
    kind = next((kind for kind, sequence in _SEQUENCES.items() if isinstance(value, sequence)), "")
    if kind:
        return {kind: [as_nodes(v, f"{where}.{i}") for i, v in enumerate(value)]}
    raise StorageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold. Train "
        "without checkpoint, or use an optimizer and a schedule whose state is made of tensors and numbers."
    )


def from_nodes(node: Any) -> Any:
    """The inverse of `as_nodes`."""
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind in _MAPPINGS:
        pairs = [(from_nodes(k), from_nodes(v)) for k, v in content]
        return _MAPPINGS[kind](dict(pairs)) if kind == "counter" else _MAPPINGS[kind](pairs)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_nodes(v) for v in content)
    raise StorageError(f"a state holds {kind!r:.40}, which is not a known kind of value.")
