"""Look at a model before trusting any shortcut with it.

Three rows of data go through the network together and one by one, at randomly shifted weights (so that zero
initialisations and dead units hide nothing). What the shortcuts say must equal what plain reverse mode says of
each datum alone; a tensor for which it does not is handed to plain reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from lapwing._types import Tensor
from lapwing.data import ModelInput
from lapwing.errors import InputError, ModelError
from lapwing.jacobian import Block
from lapwing.layers import Calls, linear_blocks, ruled_modules
from lapwing.linearise import Linearised, Network, check_outputs, looped_rows, vectorised_rows
from lapwing.params import ParamLayout, of_module
from lapwing.sandbox import borrowed

_N = 3  # an odd number of rows that rarely equals a sequence length; equality would still be caught by the numbers

LayoutChoice = Callable[[nn.Module, ModelInput], ParamLayout]


def linearise(model: nn.Module, choose: LayoutChoice, x: ModelInput) -> Linearised:
    """A Linearised whose shortcuts have been checked on the first rows of x."""
    layout = choose(model, x)
    network = Network.of(model)
    few = network.placed(x.rows(torch.arange(_N) % x.n))
    plain = Linearised(network, layout, _datum_shape(network, few), {}, vectorised=False, row_floats=layout.p)
    _check_rows_independent(plain, few)
    with borrowed(model):
        shifted = _shifted(plain)
        truth, cotangents = _true_rows(shifted, few)
        blocks = _agreeing_blocks(shifted, few, cotangents, truth)
        with_rules = replace(shifted, ruled={path: model.get_submodule(path) for path in blocks})
        vectorised = bool(with_rules.rest.names) and _vectorised_agrees(with_rules, few, cotangents, truth)
    row_floats = with_rules.rest.p + sum(block.row_floats for block in blocks.values())
    return replace(plain, ruled=with_rules.ruled, vectorised=vectorised, row_floats=row_floats)


def last_layer(model: nn.Module, x: ModelInput) -> ParamLayout:
    """The parameters of the module, among those that hold parameters, that the forward pass enters last.

    Entered, not left: a model with parameters of its own (a class token) is left after its head.
    """
    network = Network.of(model)
    few = network.placed(x.rows(torch.arange(_N) % x.n))
    entered: list[str] = []
    holders = {path: m for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
    with borrowed(model), torch.no_grad():  # which takes the hooks off again
        for path, module in holders.items():
            module.register_forward_pre_hook(lambda *_, path=path: entered.append(path))
        network(few, {})
    if not entered:
        raise InputError(
            'params="last_layer": no module that holds parameters was called in the forward pass. '
            'Name the parameters instead: params=["<name>"].'
        )
    return of_module(model, entered[-1])


def _datum_shape(network: Network, few: ModelInput) -> tuple[int, ...]:
    with borrowed(network.model), torch.no_grad():
        return check_outputs(network(few, {}), few.n)


def _check_rows_independent(linearised: Linearised, few: ModelInput) -> None:
    """f of a datum must not depend on its neighbours in the batch, or it has no Jacobian of its own."""
    together = linearised.outputs(few)
    try:
        alone = torch.cat([linearised.outputs(few.rows(slice(i, i + 1))) for i in range(few.n)])
    except ModelError as error:
        raise InputError(
            f"The model takes {few.n} rows but not one alone, so rows depend on the other rows in the batch: {error} "
            "Usual cause: BatchNorm with track_running_stats=False."
        ) from error.__cause__
    worst = float((together - alone).abs().max())
    scale = float(alone.abs().max()) + 1e-6
    if worst > 50 * _tolerance(together.dtype) * scale:
        raise InputError(
            f"The model's output for a datum changes by {worst:.3g} (of {scale:.3g}) when other rows are in the batch, "
            "even in eval mode, so error bars per datum are not defined. Usual causes: BatchNorm with "
            "track_running_stats=False, or a batch axis that is not the first."
        )


def _shifted(linearised: Linearised) -> Linearised:
    """The same network at weights moved by a tenth of their size, at random."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict(linearised.network.tensors)
    for name in linearised.layout.names:
        old = tensors[name]
        noise = torch.randn(old.shape, generator=generator, dtype=torch.float64).to(old.device, old.dtype)
        tensors[name] = old + 0.1 * (old.double().square().mean().sqrt().to(old.dtype) + 0.1) * noise
    return replace(linearised, network=replace(linearised.network, tensors=tensors))


def _true_rows(linearised: Linearised, few: ModelInput) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    cotangents = torch.randn(few.n, linearised.k, 2, generator=generator, dtype=torch.float64)
    leaves = {name: linearised.network.tensors[name].detach().requires_grad_() for name in linearised.layout.names}
    some = next(iter(leaves.values()))
    dtype = linearised.outputs(few).dtype
    cotangents = cotangents.to(some.device, dtype)
    return looped_rows(linearised, few, leaves, cotangents), cotangents


def _agreeing_blocks(
    linearised: Linearised, few: ModelInput, cotangents: Tensor, truth: dict[str, Tensor]
) -> dict[str, Block]:
    """By module path, the captured factors that reproduce the true rows of every datum."""
    candidates = ruled_modules(linearised.network.model, linearised.layout)
    with replace(linearised, ruled=candidates).trace(few) as trace:
        usable = {path: calls for path, calls in trace.calls.items() if _divides(calls, few.n)}
        blocks = linear_blocks(usable, linearised.layout, trace.f, cotangents)
    names = linearised.layout.modules
    return {
        path: block
        for path, block in blocks.items()
        if all(_close(part, _flat(truth[n])) for n, part in zip(names[path], block.parts(), strict=True))
    }


def _divides(calls: Calls, n: int) -> bool:
    """Whether the module's inputs can be told apart by datum at all, and reach the output."""
    return (
        bool(calls.inputs)
        and all(a.numel() % (n * a.shape[-1]) == 0 for a in calls.inputs)
        and all(s.requires_grad for s in calls.outputs)
    )


def _vectorised_agrees(linearised: Linearised, few: ModelInput, cotangents: Tensor, truth: dict[str, Tensor]) -> bool:
    rest = {name: linearised.network.tensors[name] for name in linearised.rest.names}
    try:
        rows = vectorised_rows(linearised, few, rest, cotangents)
    except Exception:  # torch.func refuses many models, in many ways; the loop computes the same rows for all of them
        return False
    return all(_close(_flat(rows[name]), _flat(truth[name])) for name in rest)


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = _tolerance(b.dtype)
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= tolerance * b.norm() + 1e-30)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype, 5e-2)


def _flat(rows: Tensor) -> Tensor:
    """(n, c, *shape) → (n, c, k), also for tensors without axes."""
    return rows.reshape(*rows.shape[:2], -1)
