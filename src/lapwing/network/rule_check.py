"""Look at a model before trusting any shortcut with it.

Three rows of data go through the network together and one by one, at randomly shifted weights (so that zero
initialisations and dead units hide nothing). What the shortcuts say must equal what plain reverse mode says of
each datum alone, for a random combination of its outputs; a tensor for which it does not is handed to plain reverse
mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.errors import InputError, LapwingError, ModelError
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
from lapwing.network.linearised import Linearised, Trace, pull_back, vectorised_rows
from lapwing.network.module import Network, check_outputs, with_images_in
from lapwing.network.parameters import ParamLayout, of_module

_FEW_CHANNELS = 16  # with which strided 1 × 1 convolutions are not run with channels last

_PERIOD = 65_537  # a prime: no axis of a tensor comes round with it

T = TypeVar("T", int, Tensor)
LayoutChoice = Callable[[nn.Module, ModelInput], ParamLayout]


def linearise(model: nn.Module, choose: LayoutChoice, x: ModelInput) -> Linearised:
    """A Linearised whose shortcuts have been checked on the first rows of x."""
    asked = choose(model, x)
    layout = asked.whole
    network, few, output = Network.tried(model, x)
    shape = check_outputs(output, few.n)
    plain = Linearised(network, layout, shape, (), vectorised=False, sizes=RowSizes(layout.p, layout.p))
    with plain.borrowed() as own:
        shifted, directions = _shifted(own)
        truth = _true_projections(shifted, few, directions)
        shifted, agreed = _agreeing_blocks(shifted, few, truth)
        blocks, last = agreed.blocks, agreed.last
        with_rules = replace(shifted, ruled=tuple(blocks))
        vectorised = bool(with_rules.rest.names) and _vectorised_agrees(with_rules, few, truth)
    if last is not None and agreed.implicit is not None and set(blocks) == {last}:
        blocks = {last: [agreed.implicit]}
    sizes = RowSizes.of([block for some in blocks.values() for block in some], layout.p)
    sizes = replace(sizes, factored=sizes.factored + with_rules.rest.p)
    if asked.selection is not None:  # the factors of whole layers, and the columns taken out of them
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
    """The parameters of the module, among those that hold parameters, that the forward pass enters last.

    Entered, not left: a model with parameters of its own (a class token) is left after its head.
    """
    network, few, _ = Network.tried(model, x)
    entered: list[str] = []
    with network.borrowed() as own, torch.no_grad():  # the hooks go with the copy
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
    """Numbers that a forward pass keeps for the way back, for each datum; None when there is no telling."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def keep(tensor: Tensor) -> int:
        # Nothing goes back through this graph. A tensor returned here would be held by its own graph for ever.
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
class Projections:
    """What plain reverse mode says of three data, for a random combination of outputs each.

    Rows of J are compared through their products with one random direction per tensor: two different rows agree
    there by chance only, and nothing of the size of all rows is kept. Shortcuts are asked for two combinations at once,
    as a fit asks for several; neighbours are compared in different ones.
    """

    directions: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    cotangents: Float[Tensor, "n k 2"]
    values: Mapping[str, Float[Tensor, " n"]]
    norms: Mapping[str, Float[Tensor, " n"]]

    def agree(self, name: str, found: Float[Tensor, "n 2"], beside: Sequence[str] = ()) -> bool:
        """Up to the tensor's own size, and the rounding of those beside it in the same module.

        A bias may cancel out of the network (that of attention's keys does): its gradient is rounding then.
        """
        dtype = self.dtypes[name]
        rounding = sum((self.norms[other] for other in beside), torch.full_like(self.norms[name], 1e-30))
        slack = min(100 * torch.finfo(dtype).eps, _tolerance(dtype) / 10)  # in half precision eps is large
        allowed = _tolerance(dtype) * self.norms[name] + slack * rounding
        data = torch.arange(len(found))
        return bool(((found[data, _column(data)].double() - self.values[name]).abs() <= allowed).all())


def _column(datum: T) -> T:
    return datum % 2


def _shifted(linearised: Linearised) -> tuple[Linearised, _Directions]:
    """The same network at weights moved by a tenth of their size at random, and the directions moved in."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict(linearised.network.tensors)
    directions = _Directions({}, linearised.network.tensors)
    for name in linearised.layout.names:
        old = tensors[name]
        directions.drawn[name] = _random(old.numel(), generator)
        size = float(old.norm(dtype=torch.promote_types(old.dtype, torch.float32))) / old.numel() ** 0.5
        tensors[name] = torch.add(old, directions[name], alpha=0.1 * (size + 0.1))
    return replace(linearised, network=replace(linearised.network, tensors=tensors)), directions


@dataclass(frozen=True, eq=False)
class _Directions(Mapping[str, Tensor]):
    """A random direction for each tensor, written out when it is asked for: all together would be another network."""

    drawn: dict[str, Tensor]
    like: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        drawn, like = self.drawn[name], self.like[name]
        size = like.numel()
        whole = drawn.to(like).repeat(-(-size // _PERIOD))[:size] if size > _PERIOD else drawn.to(like)
        return whole.reshape(like.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.drawn)

    def __len__(self) -> int:
        return len(self.drawn)


def _random(size: int, generator: torch.Generator) -> Float[Tensor, " _"]:
    """Numbers of unit variance. Many repeat themselves: drawing all would take longer than a forward pass."""
    return torch.empty(min(size, _PERIOD), dtype=torch.float32).uniform_(-1.7, 1.7, generator=generator)


def _true_projections(linearised: Linearised, few: ModelInput, directions: Mapping[str, Tensor]) -> Projections:
    names = linearised.layout.names
    with torch.no_grad():
        together = linearised.flat(linearised.network(few, {}), few.n)
    generator = torch.Generator().manual_seed(1)
    cotangents = torch.randn(few.n, linearised.k, 2, generator=generator, dtype=torch.float64).to(together)
    leaves = {name: linearised.network.tensors[name].detach().requires_grad_() for name in names}
    values, norms = (torch.zeros(len(names), few.n, dtype=torch.float64) for _ in range(2))
    alone = torch.empty_like(together)
    for i in range(few.n):
        f = _output_alone(linearised, few, i, leaves)
        alone[i] = f.detach()
        for k, row in enumerate(pull_back(f, list(leaves.values()), cotangents[i, :, _column(i)])):
            values[k, i] = _product(row, directions[names[k]])
            norms[k, i] = float(row.norm())
    _check_rows_independent(together, alone)
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
    return Projections(
        directions, dtypes, cotangents, dict(zip(names, values, strict=True)), dict(zip(names, norms, strict=True))
    )


def _output_alone(linearised: Linearised, few: ModelInput, i: int, leaves: Mapping[str, Tensor]) -> Float[Tensor, " k"]:
    try:
        return linearised.flat(linearised.network(few.rows(slice(i, i + 1)), leaves), 1)[0]
    except ModelError as error:
        raise InputError(
            f"The model takes {few.n} rows but not one alone, so rows depend on the other rows in the batch: {error} "
            "Usual cause: BatchNorm with track_running_stats=False."
        ) from error.__cause__


def _check_rows_independent(together: Float[Tensor, "n k"], alone: Float[Tensor, "n k"]) -> None:
    """f of a datum must not depend on its neighbours in the batch, or it has no Jacobian of its own."""
    worst = float((together - alone).abs().max())
    scale = float(alone.abs().max()) + 1e-6
    if worst > 50 * _tolerance(together.dtype) * scale:
        raise InputError(
            f"The model's output for a datum changes by {worst:.3g} (of {scale:.3g}) when other rows are in the batch, "
            "even in eval mode, so error bars per datum are not defined. Usual causes: BatchNorm with "
            "track_running_stats=False, or a batch axis that is not the first."
        )


def _product(row: Tensor, direction: Tensor) -> float:
    if row.dtype in (torch.float16, torch.bfloat16):
        return float((row * direction).sum())
    return float(torch.dot(row.reshape(-1), direction.reshape(-1)))


@dataclass(frozen=True, eq=False)
class Agreed:
    """By module path, the captured blocks that reproduce the true rows of every datum.

    Also the layer among them whose output is f, and its block if that can leave the identity implicit.
    """

    blocks: dict[str, list[Block]]
    last: str | None = None
    implicit: OutputBlock | None = None


def _agreeing_blocks(linearised: Linearised, few: ModelInput, truth: Projections) -> tuple[Linearised, Agreed]:
    """The captured blocks to use, and how images are laid out.

    With channels last in memory, convolutions, pooling and blocks are faster, but not every model can be run so: one
    that calls `.view` on a feature map cannot. So both are tried, and it is taken if it loses no block.
    """
    candidates = _faithful(linearised, few)
    channels_last = Agreed({})
    if candidates and _gains_from_channels_last(linearised.network.model):
        other = replace(linearised, layout_of_images=torch.channels_last)
        with suppress(RuntimeError, LapwingError):
            linearised.network(with_images_in(few, torch.channels_last), {})  # refuses what a trace would work around
            channels_last = _agreeing(other, few, truth, candidates)
        if channels_last.blocks.keys() == candidates.keys():
            return other, channels_last
    agreed = _agreeing(linearised, few, truth, candidates)
    if channels_last.blocks and channels_last.blocks.keys() >= agreed.blocks.keys():
        return other, channels_last
    return linearised, agreed


def _gains_from_channels_last(model: nn.Module) -> bool:
    """Whether there are 2-d convolutions, and none that torch (2.13, CPU) cannot differentiate so laid out.

    The backward pass of a strided 1 × 1 convolution of few channels then writes beyond its memory: the process dies.
    """
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    deadly = any(
        set(m.kernel_size) == {1} and max(m.stride) > 1 and m.in_channels // m.groups < _FEW_CHANNELS
        for m in convolutions
    )
    return bool(convolutions) and not deadly


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
    # Without a rewritten forward its maps are no longer seen: look again at what is left.
    return _agreeing(linearised, few, truth, {path: candidates[path] for path in agreeing})


def _output_layer(
    trace: Trace, agreeing: Mapping[str, list[Block]], truth: Projections
) -> tuple[str, OutputBlock | None] | tuple[None, None]:
    """The layer whose output is f, and its block if that can leave the identity implicit.

    Equal values are not enough (a hook may change gradients): the cotangents must come back as they are.
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
    """The modules with a rule, less those whose rewritten forward gives another output than their own."""
    candidates = ruled_modules(linearised.network.model, linearised.layout)
    other: set[str] = set()

    def compare(path: str, rule: RewrittenRule, module: nn.Module) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            again = rule.forward(module, Calls(module, rule))(*args, **kwargs)
            if not all(_same(a, b) for a, b in zip(_tensors(output), _tensors(again), strict=True)):
                other.add(path)

        module.register_forward_hook(hook, with_kwargs=True)  # it goes with the copy

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
    return a.shape == b.shape and torch.allclose(a, b, 1e-30, _tolerance(a.dtype) * float(scale), equal_nan=True)


def _projected(blocks: list[Block], layout: ParamLayout, name: str, truth: Projections) -> Float[Tensor, "n 2"]:
    """The product of a module's rows with the direction of one of its tensors."""
    direction, start = truth.directions[name].reshape(1, -1), layout[name].start
    parts = [part.shifted(-start) for block in blocks if (part := block.within(layout[name])) is not None]
    products = [part.mv(direction if isinstance(part, FactorBlock) else direction.double())[0] for part in parts]
    return torch.stack(products).sum(0)


def _divides(calls: Calls, n: int) -> bool:
    """Whether the module's inputs can be told apart by datum at all, and reach the output."""
    return bool(calls.inputs) and calls.divide(n) and all(s.requires_grad for s in calls.outputs)


def _vectorised_agrees(linearised: Linearised, few: ModelInput, truth: Projections) -> bool:
    rest = {name: linearised.network.tensors[name] for name in linearised.rest.names}
    try:
        rows = vectorised_rows(linearised, few, rest, truth.cotangents)
    except Exception:  # torch.func refuses many models, in many ways; the loop computes the same rows for all of them
        return False
    return all(truth.agree(n, (row * truth.directions[n]).flatten(2).sum(-1)) for n, row in _at_least_3d(rows).items())


def _at_least_3d(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows (n, c, *shape) of tensors without axes get one."""
    return {name: row[..., None] if row.ndim == 2 else row for name, row in rows.items()}


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype, 5e-2)
