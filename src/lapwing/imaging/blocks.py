"""Which weights share a prior: the blocks of a network, each of filters of one shape.

Biases and the scales of norms are not inferred: the prior is over weights, of two axes or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError
from lapwing.network.parameters import ParamLayout, owner, trainable

_MOST_TAPS = 121  # of a filter that has a length scale: 11 × 11


@dataclass(frozen=True)
class Block:
    """Weights with one variance, and one length scale if they are filters of more than one tap."""

    name: str
    places: tuple[slice, ...]  # in the flat vector of weights; each a whole number of filters
    kernel: tuple[int, ...] = ()  # sizes of the filters; empty where every weight stands alone

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def has_length(self) -> bool:
        return self.taps > 1

    @property
    def size(self) -> int:
        return sum(s.stop - s.start for s in self.places)

    def filters(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... f k"]:
        """The block's part of a flat vector, one row for each filter."""
        parts = [v[..., s].unflatten(-1, (-1, self.taps)) for s in self.places]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)

    def write_(self, into: Float[Tensor, "... p"], filters: Float[Tensor, "... f k"]) -> None:
        """The inverse of `filters`, in place."""
        start = 0
        for s in self.places:
            stop = start + (s.stop - s.start) // self.taps
            into[..., s] = filters[..., start:stop, :].flatten(-2)
            start = stop


def weights(network: nn.Module) -> ParamLayout:
    """The trainable tensors of two axes or more."""
    layout = trainable(network)
    kept = layout.restricted(name for name in layout.names if len(layout.shape(name)) > 1)
    if not kept.names:
        raise InputError(
            "imaging: the network has no trainable weight of two axes or more (biases and norms are not inferred), so "
            "there is nothing to put a prior on."
        )
    return kept


def one_block(layout: ParamLayout) -> tuple[Block, ...]:
    """All weights alone, with one variance."""
    return (Block("", (slice(0, layout.p),)),)


def blocks_of(network: nn.Module, layout: ParamLayout, chosen: Any = None) -> tuple[Block, ...]:
    """The blocks that the user names, or the network does (`prior_blocks()`), or one for each layer.

    Filters of different shapes in one block become blocks of their own.
    """
    named = chosen if chosen is not None else _own(network, layout)
    groups = _by_layer(layout) if named is None else _given(named, layout)
    kernels = {name: _kernel(network, name, layout) for name in layout.names}
    found = []
    for block, names in groups.items():
        shapes = dict.fromkeys(kernels[name] for name in names)
        for kernel in shapes:
            own = tuple(layout[name] for name in names if kernels[name] == kernel)
            label = block if len(shapes) == 1 else f"{block}[{'×'.join(map(str, kernel)) or '1'}]"
            found.append(Block(label, own, kernel))
    return tuple(found)


def _own(network: nn.Module, layout: ParamLayout) -> dict[str, list[str]] | None:
    """What the network says itself, of the weights that are trained."""
    method = getattr(network, "prior_blocks", None)
    if not callable(method):
        return None
    found = {block: [name for name in names if name in layout.names] for block, names in method().items()}
    return {block: names for block, names in found.items() if names}


def _by_layer(layout: ParamLayout) -> dict[str, Sequence[str]]:
    return {path or "weights": names for path, names in layout.modules.items()}


def _given(named: Any, layout: ParamLayout) -> dict[str, Sequence[str]]:
    if not isinstance(named, Mapping) or not named:
        raise InputTypeError(
            "blocks: expected a mapping from a block's name to the names of its weights, such as "
            f"{{'encoder': ['0.weight', '2.weight']}}; got {type(named).__name__}."
        )
    known, seen = set(layout.names), set[str]()
    groups: dict[str, Sequence[str]] = {}
    for block, names in named.items():
        names = [names] if isinstance(names, str) else list(names)
        strange = [name for name in names if name not in known]
        if chosen_elsewhere := [name for name in names if name in seen]:
            raise InputError(f"blocks: '{chosen_elsewhere[0]}' is in two blocks.")
        if strange:
            raise InputError(f"blocks: '{block}' names {strange[0]!r}, which is no trainable weight of the network.")
        seen.update(names)
        groups[str(block)] = [name for name in layout.names if name in names]
    if missing := [name for name in layout.names if name not in seen]:
        raise InputError(f"blocks: the weights {', '.join(missing[:3])} are in no block.")
    return groups


def _kernel(network: nn.Module, name: str, layout: ParamLayout) -> tuple[int, ...]:
    """The filter's sizes where a convolution holds the weight; of anything else every weight stands alone."""
    module = network.get_submodule(owner(name))
    if not isinstance(module, nn.modules.conv._ConvNd):
        return ()
    kernel = layout.shape(name)[2:]
    return kernel if 1 < prod(kernel) <= _MOST_TAPS else ()
