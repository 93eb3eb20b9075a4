"""Which parameters are inferred, and their order in the flat parameter vector. Nothing else decides the order.

Parameters are in `model.named_parameters()` order, each tensor row-major. A tied tensor is listed once, under its first
name. A selection infers single entries of these tensors; all other entries keep their trained values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import nn

from lapwing._types import Int, Shaped, Tensor
from lapwing.data import other_libraries
from lapwing.errors import InputError
from lapwing.linalg import all_finite


@dataclass(frozen=True, eq=False)
class ParamLayout(Mapping[str, slice]):
    """Maps names to slices of the flat parameter vector: `layout["0.weight"]` is a slice.

    `selection` (int64, ascending) holds the inferred entries of the concatenated tensors; None: all of them. Slices
    refer to the selected entries only; shapes are those of the complete tensors.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    selection: Int[Tensor, " p"] | None = None
    selected_by: str = ""  # description of the selection, for `diagnose()`

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParamLayout) or (self.names, self.shapes) != (other.names, other.shapes):
            return False
        if self.selection is None or other.selection is None:
            return self.selection is other.selection
        return torch.equal(self.selection, other.selection)

    def __hash__(self) -> int:
        return hash((self.names, self.shapes, self.p))  # without the selection: tensors hash by identity

    @cached_property
    def slices(self) -> dict[str, slice]:
        bounds = [0, *accumulate(prod(shape) for shape in self.shapes)]
        if self.selection is not None:
            # The number of selected entries before each bound is the bound among the selected entries.
            bounds = torch.searchsorted(self.selection, torch.tensor(bounds)).tolist()
        return {name: slice(*bounds[i : i + 2]) for i, name in enumerate(self.names)}

    @property
    def p(self) -> int:
        return sum(prod(shape) for shape in self.shapes) if self.selection is None else len(self.selection)

    @cached_property
    def whole(self) -> ParamLayout:
        """The layout with all entries of the same tensors."""
        return self if self.selection is None else ParamLayout(self.names, self.shapes)

    def entries(self, name: str) -> Int[Tensor, " k"]:
        """Indices of the inferred entries of a flattened tensor."""
        if self.selection is None:
            return torch.arange(prod(self.shape(name)))
        return self.selection[self[name]] - self.whole[name].start

    def selected(self, indices: Int[Tensor, " k"], by: str = "") -> ParamLayout:
        """The layout of a subset of the parameters; tensors without a selected entry are dropped."""
        at = indices if self.selection is None else self.selection[indices]
        chosen = {name: at[(at >= s.start) & (at < s.stop)] - s.start for name, s in self.whole.slices.items()}
        kept = [name for name, entries in chosen.items() if len(entries)]
        smaller = self.whole.restricted(kept)
        places = [chosen[name] + smaller[name].start for name in kept]
        # at[:0] gives dtype and device if no entry is left, where torch.cat of an empty list would raise.
        return replace(smaller, selection=torch.cat([at[:0], *places]), selected_by=by)

    def places_in(self, other: ParamLayout) -> Int[Tensor, " p"]:
        """Index of each parameter in another layout; −1 if the other layout does not infer it."""
        places = [torch.zeros(0, dtype=torch.long)]
        for name in self.names:
            mine, theirs = self.entries(name), other.entries(name)
            at = torch.searchsorted(theirs, mine)
            # searchsorted may return len(theirs): the appended −1 matches no entry.
            known = torch.cat([theirs, theirs.new_full((1,), -1)])[at] == mine
            places.append(torch.where(known, at + other[name].start, -1))
        return torch.cat(places)

    def __getitem__(self, name: str) -> slice:
        return self.slices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[self.names.index(name)]

    def ravel(self, tensors: Mapping[str, Tensor]) -> Shaped[Tensor, " p"]:
        """Concatenate named tensors to a flat vector."""
        if not self.names:
            return torch.zeros(0, dtype=torch.float64)
        flat = torch.cat([tensors[name].reshape(-1) for name in self.names])
        return flat if self.selection is None else flat[self.selection.to(flat.device)]

    def unravel(self, theta: Shaped[Tensor, "... p"]) -> dict[str, Tensor]:
        """Split flat vectors into named tensors, zero at entries that are not inferred; leading axes are kept."""
        lead, flat = theta.shape[:-1], theta
        if self.selection is not None:
            flat = theta.new_zeros(*lead, self.whole.p).index_copy(-1, self.selection.to(theta.device), theta)
        return {name: flat[..., s].reshape((*lead, *self.shape(name))) for name, s in self.whole.slices.items()}

    def restricted(self, names: Iterable[str]) -> ParamLayout:
        """The layout of a subset of the tensors, in the same order."""
        wanted = set(names)
        kept = tuple(name for name in self.names if name in wanted)
        smaller = ParamLayout(kept, tuple(self.shape(name) for name in kept))
        if self.selection is None:
            return smaller
        places = [self.entries(name) + smaller[name].start for name in kept]
        return replace(smaller, selection=torch.cat([self.selection[:0], *places]), selected_by=self.selected_by)

    @cached_property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """Module path → names of the tensors it holds directly, weight and bias together.

        These are contiguous, with one exception: a parametrised tensor may come after the parameters of the module's
        children. It is then listed under a path of its own.
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
            f"Nothing to infer: none of the model's {total} parameter tensors has requires_grad=True. {_thaw(model)}"
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


def _thaw(model: nn.Module) -> str:
    """Advice on how to get trainable parameters, depending on why there are none."""
    if other_libraries.has_adapters(model):
        return (
            "The adapters were loaded frozen: load them with PeftModel.from_pretrained(base, path, is_trainable=True)."
        )
    integers = next(other_libraries.quantised(model), None)
    if integers is not None:
        return _QUANTISED.format(integers)
    return "Unfreeze the ones you want error bars from: `for p in model.parameters(): p.requires_grad_(True)`."


def differentiable(model: nn.Module, layout: ParamLayout) -> ParamLayout:
    """The layout; raises if torch's quantised layers, which have no derivative, follow one of its modules.

    Gradients stop at such layers: parameters before them would appear to have no effect on the outputs.
    """
    paths = [path for path, _ in model.named_modules()]  # in the order of definition, usually that of the forward pass
    packed = [path for path, module in model.named_modules() if other_libraries.has_packed_weights(module)]
    if packed and any(paths.index(owner(name)) < paths.index(packed[-1]) for name in layout.names):
        raise InputError(_QUANTISED.format(next(other_libraries.quantised(model))))
    return layout


_QUANTISED = (
    "The model is quantised: {} holds integers, which have no derivative. Fit the network in floating point, before it "
    'is quantised, or name the layers behind the last quantised one: params=["head"].'
)


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


def weights_of(layout: ParamLayout) -> ParamLayout:
    """The layout of tensors with at least two axes: without biases, scales and shifts."""
    weights = layout.restricted(name for name in layout.names if len(layout.shape(name)) > 1)
    if not weights.names:
        raise InputError("weights_only: none of the parameter tensors has two axes or more, so there is no weight.")
    return weights


def of_module(model: nn.Module, path: str) -> ParamLayout:
    """The trainable parameters that a module holds directly, including tensors tied to another module.

    A tied tensor is one parameter: the outputs depend on it through every module that holds it.
    """
    layout = trainable(model)
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    held = (id(tensor) for tensor in model.get_submodule(path).parameters(recurse=False))
    own = {*layout.modules.get(path, ()), *(first[tensor] for tensor in held)} & set(layout.names)
    if not own:
        raise InputError(
            f"The last layer, '{path or type(model).__name__}', has no trainable parameter (all are frozen). "
            'Unfreeze it, or name the parameters you want: params=["<name>.*"].'
        )
    return layout.restricted(own)


def tied(model: nn.Module, layout: ParamLayout) -> bool:
    """Whether one of these tensors is tied between several modules."""
    owners: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):  # a tied tensor appears once per name
        owners.setdefault(id(tensor), set()).add(owner(name))
    chosen = (tensor for name, tensor in model.named_parameters() if name in layout)
    return any(len(owners[id(tensor)]) > 1 for tensor in chosen)


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
