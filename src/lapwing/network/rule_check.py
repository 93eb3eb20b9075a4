"""Check the layer rules against reverse-mode AD on a given model before they are used.

Three data are evaluated together and one by one, at randomly perturbed weights (zero-initialised weights and dead units
would hide errors). The rows of J from layer rules must equal those from reverse-mode AD of each datum alone, for a
random combination of its outputs. Tensors for which they differ are differentiated by reverse mode without a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.errors import InputError, LapwingError
from lapwing.network.jacobian import Block, FactorBlock, OutputBlock, RowSizes
from lapwing.network.layers import (
    Calls,
    OutputLayer,
    RewrittenRule,
    captured_blocks,
    places,
    pulled_back,
    rule_for,
    ruled_modules,
)
from lapwing.network.linearised import Linearised, Trace, vectorised_rows
from lapwing.network.module import Network, check_outputs, with_images_in
from lapwing.network.parameters import ParamLayout, of_module
from lapwing.network.reference_rows import Projections, perturbed, tolerance, true_projections

_FEW_CHANNELS = 16  # below this, strided 1 × 1 convolutions are not run in channels_last format

LayoutChoice = Callable[[nn.Module, ModelInput], ParamLayout]


def linearise(model: nn.Module, choose: LayoutChoice, x: ModelInput) -> Linearised:
    """Build a Linearised with the layer rules that pass the check on the first data of x."""
    asked = choose(model, x)
    layout = asked.whole
    network, few, output = Network.tried(model, x)
    shape = check_outputs(output, few.n)
    plain = Linearised(network, layout, shape, (), vectorised=False, sizes=RowSizes(layout.p, layout.p))
    with plain.borrowed() as own:
        shifted, directions = perturbed(own)
        truth = true_projections(shifted, few, directions)
        shifted, agreed = _agreeing_blocks(shifted, few, truth)
        blocks, last = agreed.blocks, agreed.last
        with_rules = replace(shifted, ruled=tuple(blocks))
        vectorised = bool(with_rules.rest.names) and _vectorised_agrees(with_rules, few, truth)
    if last is not None and agreed.implicit is not None and set(blocks) == {last}:
        blocks = {last: [agreed.implicit]}
    sizes = RowSizes.of([block for some in blocks.values() for block in some], layout.p)
    sizes = replace(sizes, factored=sizes.factored + with_rules.rest.p)
    if asked.selection is not None:  # rows need the factors of complete layers and the selected columns
        both = max(1, sizes.factored + asked.p)
        sizes = RowSizes(both, both)
    images = with_rules.layout_of_images
    return replace(
        plain,
        layout=asked,
        ruled=with_rules.ruled,
        vectorised=vectorised,
        sizes=sizes,
        layout_of_images=images,
        last=last,
        shared=x.whole,
        datum_floats=_datum_floats(network, few),
    )


def last_layer(model: nn.Module, x: ModelInput) -> ParamLayout:
    """The parameters of the last layer: the module with parameters that the forward pass enters last.

    Entered, not left: a model that holds a parameter directly (a class token) is left after its head.
    """
    network, few, _ = Network.tried(model, x)
    entered: list[str] = []
    with network.borrowed() as own, torch.no_grad():  # hooks need no removal: they are on the private copy
        holders = [(p, m) for p, m in own.model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        for path, module in holders:
            module.register_forward_pre_hook(lambda *_, path=path: entered.append(path))
        own(few, {})
    if not entered:
        raise InputError(
            'params="last_layer": no module that holds parameters was called in the forward pass. '
            'Name the parameters instead: params=["<name>"].'
        )
    return of_module(model, entered[-1])


def _datum_floats(network: Network, few: ModelInput) -> int | None:
    """Number of activation entries that a forward pass saves for the backward pass, per datum; None if unknown."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # keeps storages alive, so that no address is reused during the count

    def keep(tensor: Tensor) -> int:
        # No backward pass follows, so return a number: returning the tensor would make a cycle with its graph.
        alive.append(tensor.detach())
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return 0

    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in network.tensors.items()
        if name not in network.buffers and tensor.is_floating_point()
    }
    with suppress(Exception), network.borrowed() as own, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        f = own(few, leaves)
        for leaf in leaves.values():
            kept.pop(leaf.untyped_storage().data_ptr(), None)
        return -(-(sum(kept.values()) + f.numel()) // few.n)
    return None


@dataclass(frozen=True, eq=False)
class Agreed:
    """Captured blocks that passed the check, by module path.

    `last` is the path of the layer whose output is f; `implicit` its block with an implicit identity, if possible.
    """

    blocks: dict[str, list[Block]]
    last: str | None = None
    implicit: OutputBlock | None = None


def _agreeing_blocks(linearised: Linearised, few: ModelInput, truth: Projections) -> tuple[Linearised, Agreed]:
    """The captured blocks that agree, and the memory format of images.

    channels_last makes convolutions, pooling and Jacobian blocks faster, but fails for models that call `.view` on a
    feature map. So both formats are checked; channels_last is used if no block is lost by it.
    """
    candidates = _faithful(linearised, few)
    channels_last = Agreed({})
    if candidates and _gains_from_channels_last(linearised.network.model):
        other = replace(linearised, layout_of_images=torch.channels_last)
        with suppress(RuntimeError, LapwingError):
            linearised.network(with_images_in(few, torch.channels_last), {})  # raises; a trace falls back silently
            channels_last = _agreeing(other, few, truth, candidates)
        if channels_last.blocks.keys() == candidates.keys():
            return other, channels_last
    agreed = _agreeing(linearised, few, truth, candidates)
    if channels_last.blocks and channels_last.blocks.keys() >= agreed.blocks.keys():
        return other, channels_last
    return linearised, agreed


def _gains_from_channels_last(model: nn.Module) -> bool:
    """Whether there are 2-d convolutions, and none that crash in channels_last format.

    In torch 2.13 on the CPU, the backward pass of a strided 1 × 1 convolution with few channels writes out of bounds.
    """
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    crashes = any(
        set(m.kernel_size) == {1} and max(m.stride) > 1 and m.in_channels // m.groups < _FEW_CHANNELS
        for m in convolutions
    )
    return bool(convolutions) and not crashes


def _agreeing(linearised: Linearised, few: ModelInput, truth: Projections, candidates: dict[str, nn.Module]) -> Agreed:
    layout = linearised.layout
    agreeing = {}
    with replace(linearised, ruled=tuple(candidates)).trace(few) as trace:
        usable = {path: calls for path, calls in trace.calls.items() if _divides(calls, few.n)}
        captured = captured_blocks(usable, layout, trace.f, truth.cotangents)
        for path, blocks in captured.items():
            names = layout.modules[path]
            if all(truth.agree(n, _projected(blocks, layout, n, truth), names) for n in names):
                agreeing[path] = blocks
        unseen = {path: calls for path, calls in trace.calls.items() if path not in agreeing}
        if not any(isinstance(calls.rule, RewrittenRule) for calls in unseen.values()):
            return Agreed(agreeing, *_output_layer(trace, agreeing, truth))
    # A rewritten forward that failed is dropped. Other modules inside it (out_proj) were captured only through it, so
    # check the remaining ones again.
    return _agreeing(linearised, few, truth, {path: candidates[path] for path in agreeing})


def _output_layer(
    trace: Trace, agreeing: Mapping[str, list[Block]], truth: Projections
) -> tuple[str, OutputBlock | None] | tuple[None, None]:
    """The layer whose output is f, and its block with an implicit identity if possible.

    Equal values are not enough, as a hook may change gradients: the backward pass must return the cotangents unchanged.
    """
    for path in agreeing:
        calls = trace.calls[path]
        layer = OutputLayer.of(calls, places(trace.linearised.layout, path), trace.f)
        if layer is not None and all(_returned(trace.f, calls.outputs, u) for u in truth.cotangents.unbind(-1)):
            found = replace(trace, last=layer)
            return path, found.output_block(torch.arange(trace.linearised.k, device=trace.f.device))
    return None, None


def _returned(f: Tensor, outputs: list[Tensor], u: Tensor) -> bool:
    (g,) = pulled_back(f, outputs, u)
    return torch.equal(g.reshape(u.shape), u.to(g.dtype))


def _faithful(linearised: Linearised, few: ModelInput) -> dict[str, nn.Module]:
    """The modules with a rule, except those whose rewritten forward gives a different output."""
    candidates = ruled_modules(linearised.network.model, linearised.layout)
    other: set[str] = set()

    def compare(path: str, rule: RewrittenRule, module: nn.Module) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            again = rule.forward(module, Calls(module, rule))(*args, **kwargs)
            if not all(_same(a, b) for a, b in zip(_tensors(output), _tensors(again), strict=True)):
                other.add(path)

        module.register_forward_hook(hook, with_kwargs=True)  # on a private copy: no removal needed

    rewritten = {path: rule for path, m in candidates.items() if isinstance(rule := rule_for(m), RewrittenRule)}
    if rewritten:
        with linearised.network.borrowed() as own, torch.no_grad():
            for path, rule in rewritten.items():
                compare(path, rule, own.model.get_submodule(path))
            own(few, {})
    return {path: module for path, module in candidates.items() if path not in other}


def _tensors(output: Any) -> list[Tensor | None]:
    return list(output) if isinstance(output, tuple) else [output]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    scale = a.abs().nan_to_num().max()
    return a.shape == b.shape and torch.allclose(a, b, 1e-30, tolerance(a.dtype) * float(scale), equal_nan=True)


def _projected(blocks: list[Block], layout: ParamLayout, name: str, truth: Projections) -> Float[Tensor, "n 2"]:
    """The inner product of a module's rows with the random direction of one of its tensors."""
    direction, start = truth.directions[name].reshape(1, -1), layout[name].start
    parts = [part.shifted(-start) for block in blocks if (part := block.within(layout[name])) is not None]
    products = [part.mv(direction if isinstance(part, FactorBlock) else direction.double())[0] for part in parts]
    return torch.stack(products).sum(0)


def _divides(calls: Calls, n: int) -> bool:
    """Whether the module was called, its inputs can be split by datum, and its outputs are part of the graph."""
    return bool(calls.inputs) and calls.divide(n) and all(s.requires_grad for s in calls.outputs)


def _vectorised_agrees(linearised: Linearised, few: ModelInput, truth: Projections) -> bool:
    rest = {name: linearised.network.tensors[name] for name in linearised.rest.names}
    try:
        rows = vectorised_rows(linearised, few, rest, truth.cotangents)
    except Exception:  # torch.func fails in many ways (control flow, in-place operations); the loop always works
        return False
    return all(truth.agree(n, (row * truth.directions[n]).flatten(2).sum(-1)) for n, row in _at_least_3d(rows).items())


def _at_least_3d(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Append an axis to rows (n, c) of 0-d tensors."""
    return {name: row[..., None] if row.ndim == 2 else row for name, row in rows.items()}
