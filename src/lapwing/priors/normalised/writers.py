"""The parameters that write a tensor: scaling them together scales the tensor.

Walks the autograd graph back from the tensor through operations that are homogeneous in scale (reshapes, ReLU, pooling,
means, powers) to the nearest operations that are linear in a parameter. At a sum all terms are followed: the residual
stream of a network is written by all of its branches. The result is a candidate, which is tested numerically.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

Node = Any  # torch.autograd.graph.Node, and None for what needs no gradient

_SHAPES = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Expand", "Unsqueeze", "Squeeze", "Clone",
    "ToCopy", "Alias", "AsStrided",
})  # fmt: skip
_SCALES = _SHAPES | {
    "Slice", "Select", "Index", "IndexSelect", "Gather", "Split", "SplitWithSizes", "Unbind", "Chunk", "Repeat", "Roll",
    "Flip", "Copy", "Relu", "LeakyRelu", "PreluKernel", "Threshold", "MaxPool2DWithIndices", "MaxPool3DWithIndices",
    "AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D",
    "Mean", "Sum", "Amax", "Max", "Var", "Std", "VarMean", "StdMean", "LinalgVectorNorm", "Norm", "Pow", "Square",
    "Sqrt", "Abs", "Neg", "Div", "ConstantPadNd", "ReflectionPad1D", "ReflectionPad2D", "ReplicationPad1D",
    "ReplicationPad2D", "UpsampleNearest1D", "UpsampleNearest2D", "UpsampleBilinear2D", "PixelShuffle",
    "PixelUnshuffle", "NativeDropout", "MaskedFill", "Im2Col", "Col2Im",
}  # fmt: skip
_SUMS = frozenset({"Add", "Sub", "Cat", "Stack", "Where"})
_PRODUCTS = frozenset({"Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Addbmm", "Mv", "Dot"})
_WEIGHT_NORM = "WeightNormInterface"  # w = g v / ‖v‖ is linear in g, its second input

Writers = frozenset[str]


class Graph:
    """The autograd graph behind some tensors; its leaves are the named parameters."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.names = {id(leaf): name for name, leaf in leaves.items()}
        self.known: dict[Node, Writers | None] = {}

    def writers(self, z: Tensor) -> Writers | None:
        """The parameters that write z; None if the walk reaches an operation that is not homogeneous."""
        return self._solve(z.grad_fn) if z.grad_fn is not None else None

    def uses(self, f: Tensor) -> dict[str, set[str]]:
        """Parameter → the kinds of operations it enters, such as {"Mul"} for a scale."""
        found: dict[str, set[str]] = {}
        for node in _all_nodes(f.grad_fn):
            if not _passes_on(node):
                for name in (self.names.get(id(_origin(n))) for n in _inputs(node)):
                    if name is not None:
                        found.setdefault(name, set()).add(kind(node))
        return found

    def _solve(self, root: Node) -> Writers | None:
        # An explicit stack: graphs of deep networks exceed Python's recursion limit.
        stack = [root]
        while stack:
            node = stack[-1]
            unresolved = [n for n in self._followed(node) if n is not None and n not in self.known]
            if node in self.known or not unresolved:
                self.known.setdefault(node, self._resolved(node))
                stack.pop()
            else:
                stack += unresolved
        return self.known[root]

    def _followed(self, node: Node) -> list[Node]:
        """The inputs of this node through which the walk continues."""
        inputs = _inputs(node)
        if kind(node) in _SCALES:
            return inputs[:1]
        if kind(node) in _SUMS or (kind(node) in _PRODUCTS and not self._direct(node)):
            return inputs
        return []

    def _resolved(self, node: Node) -> Writers | None:
        leaf = self._leaf(node)
        if leaf is not None:
            return frozenset({leaf})
        found = [self.known[n] for n in self._followed(node) if n is not None]
        if kind(node) in _SUMS:
            written = [w for w in found if w is not None]
            return frozenset().union(*written) if written and len(written) == len(found) else None
        if kind(node) in _SCALES or (kind(node) in _PRODUCTS and not self._direct(node)):
            return next((w for w in found if w is not None), None)
        return self._direct(node) or None

    def _direct(self, node: Node) -> Writers:
        """Parameters that enter this operation directly or after a reshape."""
        names = {name for n in _inputs(node) if (name := self._leaf(n)) is not None}
        for n in _inputs(node):
            while n is not None and kind(n) in _SHAPES:
                n = _inputs(n)[0]
            if n is not None and kind(n) == _WEIGHT_NORM:
                name = self._leaf(_inputs(n)[1])
                names |= {name} if name is not None else set()
        return frozenset(names)

    def _leaf(self, node: Node) -> str | None:
        while node is not None and kind(node) in _SHAPES:
            node = _inputs(node)[0]
        return self.names.get(id(getattr(node, "variable", None))) if node is not None else None


def kind(node: Node) -> str:
    """ "Addmm" for AddmmBackward0."""
    return node.name().rpartition("::")[2].partition("Backward")[0]


def _inputs(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions]


def _passes_on(node: Node) -> bool:
    """Whether an operation only reshapes its input or adds a constant to it: 1 + γ acts as a scale, like γ."""
    return kind(node) in _SHAPES or (kind(node) in _SUMS and sum(n is not None for n in _inputs(node)) == 1)


def _origin(node: Node) -> Tensor | None:
    """The leaf behind reshapes and added constants; None behind any other operation."""
    while node is not None and _passes_on(node):
        node = next((n for n in _inputs(node) if n is not None), None)
    return getattr(node, "variable", None)


def _all_nodes(root: Node) -> Iterator[Node]:
    seen, stack = set(), [root]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack += _inputs(node)
