"""Which parameters are inferred, and in which order: decided once, here.

Parameters stand in `model.named_parameters()` order, each tensor row-major. A tensor that several modules
share is listed once, under the first of its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

import torch
from torch import nn

from lapwing._types import Shaped, Tensor
from lapwing.errors import InputError
from lapwing.linalg import all_finite


@dataclass(frozen=True)
class ParamLayout(Mapping[str, slice]):
    """Names ↔ slices of the flat parameter vector: `layout["0.weight"]` is a slice."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def slices(self) -> dict[str, slice]:
        slices, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            slices[name] = slice(start, start + prod(shape))
            start += prod(shape)
        return slices

    @property
    def p(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def __getitem__(self, name: str) -> slice:
        return self.slices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[self.names.index(name)]

    def ravel(self, tensors: Mapping[str, Tensor]) -> Shaped[Tensor, " p"]:
        """One flat vector out of named tensors."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unravel(self, theta: Shaped[Tensor, "... p"]) -> dict[str, Tensor]:
        """Named tensors out of a flat vector; leading axes are kept."""
        lead = theta.shape[:-1]
        return {name: theta[..., self[name]].reshape(*lead, *self.shape(name)) for name in self.names}

    def restricted(self, names: Iterable[str]) -> ParamLayout:
        """The layout of a subset of the tensors, in the same order."""
        wanted = set(names)
        kept = tuple(name for name in self.names if name in wanted)
        return ParamLayout(kept, tuple(self.shape(name) for name in kept))

    @cached_property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """Module path → the tensors it holds itself: its weight and bias together.

        They stand side by side, except when a parametrised tensor comes after the module's children; that tensor is
        then listed under a path of its own.
        """
        grouped: dict[str, list[str]] = {}
        previous = None
        for name in self.names:
            path = owner(name)
            if path in grouped and path != previous:
                path = name.rpartition(".")[0]
            grouped.setdefault(path, []).append(name)
            previous = path
        return {path: tuple(names) for path, names in grouped.items()}

    @cached_property
    def module_slices(self) -> dict[str, slice]:
        """Module path → the contiguous block of its parameters."""
        return {path: slice(self[names[0]].start, self[names[-1]].stop) for path, names in self.modules.items()}


def owner(name: str) -> str:
    """The path of the module that holds a parameter: "block.fc" for "block.fc.weight".

    A parametrised tensor, "fc.parametrizations.weight.original0", belongs to "fc".
    """
    return name.split(".parametrizations.")[0] if ".parametrizations." in name else name.rpartition(".")[0]


def trainable(model: nn.Module) -> ParamLayout:
    """Every parameter with `requires_grad`."""
    chosen = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not chosen:
        total = sum(1 for _ in model.parameters())
        raise InputError(
            f"Nothing to infer: none of the model's {total} parameter tensors has requires_grad=True. "
            "Unfreeze the ones you want error bars from: `for p in model.parameters(): p.requires_grad_(True)`."
        )
    for name, p in chosen:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InputError(f"Parameter '{name}' is not initialised yet (a lazy module). Run one forward pass first.")
        if not p.is_floating_point():
            raise InputError(
                f"Parameter '{name}' has dtype {p.dtype}; only real floating-point parameters can be inferred."
            )
        if not all_finite(p.detach()):
            raise InputError(f"Parameter '{name}' holds NaN or infinite values; the model must be trained and finite.")
    return ParamLayout(tuple(name for name, _ in chosen), tuple(tuple(p.shape) for _, p in chosen))


def matching(model: nn.Module, patterns: Sequence[str]) -> ParamLayout:
    """The trainable parameters whose name, or whose module's path, matches one of the glob patterns."""
    layout = trainable(model)
    if not patterns:
        raise InputError("`params` is an empty list: name at least one parameter, module or glob pattern.")
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in layout.names if _matches(name, pattern)}
        if not hits:
            raise InputError(_no_match(model, layout, pattern))
        chosen |= hits
    return layout.restricted(chosen)


def of_module(model: nn.Module, path: str) -> ParamLayout:
    """The trainable parameters that one module holds itself."""
    layout = trainable(model)
    if path not in layout.modules:
        raise InputError(
            f"The last layer, '{path or type(model).__name__}', has no trainable parameter (all are frozen). "
            'Unfreeze it, or name the parameters you want: params=["<name>.*"].'
        )
    return layout.restricted(layout.modules[path])


def _matches(name: str, pattern: str) -> bool:
    parents = [name]
    while "." in parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    return any(fnmatchcase(candidate, pattern) for candidate in parents)


def _no_match(model: nn.Module, layout: ParamLayout, pattern: str) -> str:
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad and _matches(name, pattern)]
    if frozen:
        return (
            f"params: '{pattern}' matches only frozen parameters ({', '.join(frozen[:3])}); set requires_grad on them."
        )
    words = get_close_matches(pattern, ("all", "last_layer"), n=1, cutoff=0.7)
    near = get_close_matches(pattern, layout.names, n=3, cutoff=0.3)
    hint = f' Did you mean "{words[0]}"?' if words else f" Close: {', '.join(near)}." if near else ""
    return f"params: nothing in the model matches '{pattern}'.{hint} Known names begin {', '.join(layout.names[:5])}."
