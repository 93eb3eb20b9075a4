"""The steps of a network's forward pass, traced once by `torch.fx`: what each computes, and its way back.

Functions that do what a layer does (`F.relu`, `x.flatten(1)`, …) become that layer; sums and concatenations join
branches, so residual networks and classes with a `forward` of their own are written out as well as `nn.Sequential`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lapwing.errors import StructureError
from lapwing.integrations.export.layers import AveragePool, Layer, Reshaped, Scaled, layer_of

Back = Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Step:
    """values[k] = run(values[sources]…); `back` pulls a cotangent (B, K, …) to each of the sources."""

    path: str  # of the module; of a function, the name of its place in the graph
    run: Callable[..., Tensor]
    sources: tuple[int, ...]
    back: Back
    layer: Layer | None = None


def steps(model: nn.Module, x: Tensor) -> list[Step]:
    """The steps in their order; value 0 is the input, value k + 1 what step k computes."""
    for module in model.modules():
        if getattr(module, "inplace", False):
            vars(module)["inplace"] = False  # in a copy of the user's: the way back needs what every step saw
    alone = fx.Tracer().is_leaf_module(model, "")  # one layer, which the tracer would not look into
    traced = _traced(nn.Sequential(model) if alone else model)
    shapes = _shapes(traced, x)
    found: list[Step] = []
    place: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            place[node] = 0
        elif node.op == "output":
            if place.get(node.args[0]) != len(found):
                raise _untraced("its output is not the last tensor that it computes")
        elif node.users and shapes.get(node) is not None:
            found.append(_step(node, traced, place, shapes))
            place[node] = len(found)
    return [replace(step, path="") for step in found] if alone else found


def _traced(model: nn.Module) -> fx.GraphModule:
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:  # control flow on data, several inputs, ...: whatever the tracer cannot follow
        raise _untraced(f"torch.fx cannot follow its forward pass ({error})") from error
    if sum(node.op == "placeholder" and bool(node.users) for node in graph.nodes) != 1:
        raise _untraced("it has several inputs")
    return fx.GraphModule(model, graph)


class _Shapes(fx.Interpreter):
    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.seen: dict[fx.Node, torch.Size] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.seen[n] = value.shape
        return value


def _shapes(traced: fx.GraphModule, x: Tensor) -> Mapping[fx.Node, torch.Size]:
    """The shape of every tensor; sizes and other numbers have none, and need no step."""
    interpreter = _Shapes(traced)
    with torch.no_grad():
        interpreter.run(x)
    return interpreter.seen


def _step(
    node: fx.Node, traced: fx.GraphModule, place: Mapping[fx.Node, int], shapes: Mapping[fx.Node, torch.Size]
) -> Step:
    if node.op == "get_attr" or any(source not in place for source in node.all_input_nodes if source in shapes):
        raise _untraced(f"it computes with the tensor {node.target!r} outside of a layer")
    sources = tuple(place[source] for source in node.all_input_nodes if source in shapes)
    if node.op == "call_module":
        module = traced.get_submodule(str(node.target))
        return _of_layer(str(node.target), module, sources)
    if _joins(node) and len({shapes[source] for source in _tensors(node)}) == 1:
        both = tuple(place[source] for source in _tensors(node))
        return Step(node.name, torch.add, both, lambda g, xs: [g for _ in xs])
    if node.target in (torch.cat, torch.concat):
        return _concatenation(node, place, shapes)
    if len(sources) == 1:
        written = _module(node, shapes)
        if written is not None:
            return _of_layer(node.name, written, sources)
    raise _untraced(f"{node.name!r} ({node.target}) is no step whose derivative is written out")


def _of_layer(path: str, module: nn.Module, sources: tuple[int, ...]) -> Step:
    layer = module.layer if isinstance(module, _Written) else layer_of(path, module)
    return Step(path, module, sources, lambda g, xs: [layer.back(g, xs[0])], layer)


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [value for value in node.args if isinstance(value, fx.Node)]


def _joins(node: fx.Node) -> bool:
    """x + y, where both are computed."""
    sums = (operator.add, operator.iadd, torch.add)
    plain = node.target in sums or (node.op, node.target) in (("call_method", "add"), ("call_method", "add_"))
    return plain and len(_tensors(node)) == len(node.args) == 2 and not node.kwargs


def _concatenation(node: fx.Node, place: Mapping[fx.Node, int], shapes: Mapping[fx.Node, torch.Size]) -> Step:
    pieces: Any = node.args[0]
    along: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    axis = along % len(shapes[node])
    if axis == 0:
        raise _untraced("it concatenates along the batch")
    widths = [shapes[piece][axis] for piece in pieces]
    return Step(
        node.name,
        lambda *xs: torch.cat(xs, axis),
        tuple(place[piece] for piece in pieces),
        lambda g, xs: g.split(widths, axis + 1),
    )


class _Written(nn.Module):
    """A step without parameters that is no module of torch."""

    def __init__(self, run: Callable[[Tensor], Tensor], layer: Layer) -> None:
        super().__init__()
        self.run, self.layer = run, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


_LAYERS: dict[Any, Callable[..., nn.Module]] = {
    F.relu: lambda inplace=False: nn.ReLU(),
    F.silu: lambda inplace=False: nn.SiLU(),
    F.leaky_relu: lambda negative_slope=0.01, inplace=False: nn.LeakyReLU(negative_slope),
    F.elu: lambda alpha=1.0, inplace=False: nn.ELU(alpha),
    F.gelu: lambda approximate="none": nn.GELU(approximate),
    F.softplus: nn.Softplus,
    F.dropout: lambda p=0.5, training=True, inplace=False: nn.Identity() if not training else nn.Dropout(p),
    F.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    **{f: nn.ReLU for f in (torch.relu, torch.relu_, "relu", "relu_")},
    **{f: nn.Tanh for f in (torch.tanh, F.tanh, "tanh")},
    **{f: nn.Sigmoid for f in (torch.sigmoid, F.sigmoid, "sigmoid")},
}
_SHAPES = ("view", "reshape", "flatten", "squeeze", torch.flatten, torch.reshape, torch.squeeze)
_SUM, _DIFFERENCE, _PRODUCT = (operator.add, operator.iadd), operator.sub, operator.mul


def _module(node: fx.Node, shapes: Mapping[fx.Node, torch.Size]) -> nn.Module | None:
    """The layer that does what this call of a function or method does to one tensor; None where there is none."""
    x, *rest = node.args
    if node.target in _LAYERS:
        options = dict(node.kwargs)
        if options.pop("return_indices", False):
            return None
        return _LAYERS[node.target](*rest, **options)
    shape = shapes[node]
    if node.target in _SHAPES and isinstance(x, fx.Node) and shape[0] == shapes[x][0]:
        return _Written(lambda v: v.reshape(v.shape[0], *shape[1:]), Reshaped())
    if node.target in ("mean", torch.mean) and isinstance(x, fx.Node) and _over_positions(node, len(shapes[x])):
        return _Written(lambda v: v.mean((2, 3)).reshape(v.shape[0], *shape[1:]), AveragePool(None))
    factor = _factor(node)
    if factor is None:
        return None
    return _Written(lambda v: node.target(*(v if arg in shapes else arg for arg in node.args)), Scaled(factor))  # type: ignore[operator]


def _over_positions(node: fx.Node, ndim: int) -> bool:
    axes: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return ndim == 4 and isinstance(axes, tuple | list) and {axis % 4 for axis in axes} == {2, 3}


def _factor(node: fx.Node) -> float | None:
    """The derivative of x + c, x − c, c − x, c x or x / c, with a number c."""
    numbers = [float(arg) for arg in node.args if isinstance(arg, int | float)]
    if len(node.args) != 2 or node.kwargs or len(numbers) != 1:
        return None
    (number,), after = numbers, isinstance(node.args[1], int | float)
    if node.target in _SUM:
        return 1.0
    if node.target is _DIFFERENCE:
        return 1.0 if after else -1.0
    if node.target is _PRODUCT:
        return number
    return 1.0 / number if node.target is operator.truediv and after else None


def _untraced(why: str) -> StructureError:
    return StructureError(
        f"export: the way back through this network is not written out: {why}. What is: layers, sums and "
        "concatenations of them, reshaping and plain numbers. For any other body fit the last layer alone: "
        'params="last_layer".'
    )
