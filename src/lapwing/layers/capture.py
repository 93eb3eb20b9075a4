"""One forward pass with hooks that keep each ruled layer's inputs and outputs; the only user of hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.jacobian import Block
from lapwing.layers import linear
from lapwing.params import ParamLayout


@dataclass(eq=False)
class Calls:
    """The inputs and outputs of one module, a pair per call in the forward pass."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Calls]]:
    """Record every call of the given modules while the context is open."""
    calls = {path: Calls() for path in modules}
    handles = [module.register_forward_hook(_keep(calls[path]), with_kwargs=True) for path, module in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _keep(calls: Calls) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        calls.inputs.append(args[0] if args else kwargs["input"])
        calls.outputs.append(output)
        # The next layer gets a copy, so that an in-place activation cannot overwrite what we differentiate by.
        return output.clone()

    return hook


def linear_blocks(calls: Mapping[str, Calls], layout: ParamLayout, f: Tensor, cotangents: Tensor) -> dict[str, Block]:
    """Blocks for every recorded module: one backward pass per column of the cotangents (n, K, c)."""
    paths = [path for path, record in calls.items() if record.outputs]
    outputs = [output for path in paths for output in calls[path].outputs]
    if not outputs:
        return {}
    gradients = [_pulled_back(f, outputs, column) for column in cotangents.unbind(-1)]
    blocks: dict[str, Block] = {}
    start = 0
    for path in paths:
        stop = start + len(calls[path].outputs)
        blocks[path] = _linear_block(calls[path], [column[start:stop] for column in gradients], layout, path, len(f))
        start = stop
    return blocks


def _pulled_back(f: Tensor, outputs: list[Tensor], column: Tensor) -> list[Tensor]:
    # The last layer's own output is f: its gradient is the cotangent itself, no backward pass needed.
    if len(outputs) == 1 and outputs[0].numel() == f.numel() and _is_last(f, outputs[0]):
        return [column.reshape(outputs[0].shape).to(outputs[0].dtype)]
    if not f.requires_grad:
        return [torch.zeros_like(s) for s in outputs]
    gradients = torch.autograd.grad(f, outputs, column.to(f.dtype), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(outputs, gradients, strict=True)]


def _is_last(f: Tensor, output: Tensor) -> bool:
    """Whether f is that output up to the copy and reshapes: nothing was computed in between."""
    node = f.grad_fn
    while node is not None and node is not output.grad_fn:
        if node.name() not in ("CloneBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
            return False
        node = node.next_functions[0][0]
    return node is not None and node is output.grad_fn


def _linear_block(record: Calls, gradients: list[list[Tensor]], layout: ParamLayout, path: str, n: int) -> Block:
    prefix = f"{path}." if path else ""
    a = torch.cat([linear.positions(x.detach(), n) for x in record.inputs], dim=1)
    g = torch.stack([torch.cat([linear.positions(s, n) for s in column], dim=1) for column in gradients], dim=1)
    return linear.block(layout.get(f"{prefix}weight"), layout.get(f"{prefix}bias"), a, g)
