"""Record inputs and outputs of layers with a rule in a forward pass, and compute their blocks by backward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.network.jacobian import Block
from lapwing.network.layers.base import Calls
from lapwing.network.layers.rules import rule_for
from lapwing.network.parameters import ParamLayout


@contextmanager
def recording(modules: Mapping[str, nn.Module], *, attached: bool = False) -> Iterator[dict[str, Calls]]:
    """Record every call of the given modules, which are borrowed, while the context is open.

    `attached`: inputs keep their graph, for blocks that are differentiable with respect to the network's inputs.
    """
    calls = {}
    for path, module in modules.items():
        rule = rule_for(module)
        assert rule is not None
        calls[path] = Calls(module, rule, attached=attached)
    ends = [record.rule.watch(record) for record in calls.values()]
    try:
        yield calls
    finally:
        for end in ends:
            end()


def captured_blocks(
    calls: Mapping[str, Calls], layout: ParamLayout, f: Tensor, cotangents: Tensor
) -> dict[str, list[Block]]:
    """Blocks for every recorded module: one backward pass per column of the cotangents (n, K, c)."""
    # Checked for every batch: a mixture of experts may route all of the first data through a layer, but not later ones.
    for path, record in calls.items():
        _check_divided(path, record, len(f))
    outputs = [output for record in calls.values() for output in record.outputs]
    attached = any(record.attached for record in calls.values())
    gradients = [pulled_back(f, outputs, column, attached=attached) for column in cotangents.unbind(-1)]
    blocks: dict[str, list[Block]] = {}
    start = 0
    for path, record in calls.items():
        stop = start + len(record.outputs)
        own = places(layout, path)
        blocks[path] = record.rule.blocks(record, [column[start:stop] for column in gradients], own, len(f))
        # Free the layer's gradients before the next block is built: this bounds the peak memory.
        for column in gradients:
            column[start:stop] = [f.new_empty(0)] * (stop - start)
        start = stop
    return blocks


def _check_divided(path: str, record: Calls, n: int) -> None:
    if not record.divide(n):
        shapes = ", ".join(str(tuple(x.shape)) for x in record.inputs)
        raise ModelError(
            f"Layer '{path}' was called with inputs of shape {shapes} for {n} data: some data skip it (a mixture of "
            "experts?), so its inputs cannot be split by datum. The rule check saw only data that use it: shuffle the "
            "data so that the first three are routed differently, or exclude the layer with params=[...]."
        )


def places(layout: ParamLayout, path: str) -> dict[str, slice]:
    """Slices of a module's inferred tensors, by the module's own names ("weight")."""
    return {name.rpartition(".")[2]: layout[name] for name in layout.modules[path]}


def pulled_back(f: Tensor, outputs: list[Tensor], column: Tensor, *, attached: bool = False) -> list[Tensor]:
    if not f.requires_grad or not outputs:
        return [torch.zeros_like(s) for s in outputs]
    gradients = vjp(f, outputs, column.to(f.dtype), attached=attached)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(outputs, gradients, strict=True)]


def vjp(f: Tensor, sources: Sequence[Tensor], u: Tensor, *, attached: bool = False) -> tuple[Tensor | None, ...]:
    """uᵀ ∂f/∂s for every source s, None if f does not depend on s. `attached`: the results are differentiable.

    Computed as the gradient of u · f: with `grad_outputs=u`, torch imports sympy (80 MB) to check the shape of u.
    """
    return torch.autograd.grad(
        (f * u).sum(), list(sources), retain_graph=True, create_graph=attached, allow_unused=True
    )
