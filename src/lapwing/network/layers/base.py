"""The interface of layer rules, and the records of a module's calls that they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.network.jacobian import Block, DenseBlock, FactorBlock, Given, Inputs
from lapwing.operators import Arrangement


@dataclass(eq=False)
class Calls:
    """Recorded inputs and outputs of one module, one pair per call in a forward pass.

    A module that computes several maps names the map of each pair in `maps`; for others the name is empty.
    """

    module: nn.Module
    rule: Rule
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)
    prepared: list[Tensor] = field(default_factory=list)  # inputs after DirectRule.prepared
    open: bool = True  # whether calls are still recorded
    attached: bool = False  # whether blocks must be differentiable with respect to the network's inputs

    def keep(self, x: Tensor, output: Tensor, of: str = "") -> None:
        if self.open:
            self.inputs.append(x if self.attached else x.detach())
            if self.attached and not output.requires_grad:  # the input does not depend on x, and weights have no graph
                output.requires_grad_()
            self.outputs.append(output)
            self.maps.append(of)

    def close(self) -> None:
        self.open = False

    def divide(self, n: int) -> bool:
        """Whether the inputs of all calls can be split by datum."""
        return all(self.rule.divides(self.module, x, n) for x in self.inputs)

    def of(self, name: str, gradients: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Inputs of one map, and their gradients [column][call]."""
        calls = [j for j, map_ in enumerate(self.maps) if map_ == name]
        return [self.inputs[j] for j in calls], [[column[j] for j in calls] for column in gradients]


class Rule(ABC):
    """A rule for one type of module. It applies only if `forward` is the one it was written for, not an override."""

    parameters: frozenset[str] = frozenset({"weight", "bias"})  # parameters that the rule covers; others disable it

    @abstractmethod
    def applies(self, module: nn.Module) -> bool: ...

    def divides(self, module: nn.Module, x: Tensor, n: int) -> bool:
        """Whether an input can be split by datum: its first axis is the batch, or a multiple of it."""
        return x.ndim > 1 and x.shape[0] % n == 0

    def watch(self, calls: Calls) -> Callable[[], None]:
        """Start recording the calls of a borrowed module; returns a function that stops it."""
        return calls.module.register_forward_hook(_keep(calls), with_kwargs=True).remove

    @abstractmethod
    def blocks(
        self, calls: Calls, gradients: Sequence[Sequence[Tensor]], where: Mapping[str, slice], n: int
    ) -> list[Block]:
        """The module's columns of J. gradients[c][j] is the gradient of output c with respect to the output of call j.

        `where` maps the module's own parameter names, such as "weight", to their slices.
        """


class RewrittenRule(Rule):
    """A rule for a module that computes its maps by functions. Its forward is replaced by one that records them."""

    @abstractmethod
    def forward(self, module: nn.Module, calls: Calls) -> Callable[..., Any]:
        """An equivalent of the module's forward that records inputs and outputs of its maps in `calls`."""

    def watch(self, calls: Calls) -> Callable[[], None]:
        # The new forward stays until the borrowed module is dropped, as activation checkpointing reruns it in the
        # backward pass; only the recording ends.
        calls.module.__dict__["forward"] = self.forward(calls.module, calls)
        return calls.close


class FactorRule(Rule):
    """A rule for s_t = W a_t + b at positions t, for q parallel maps: the Jacobian block is factored, Σ_t g_t a_tᵀ.

    The layer's parameters must be named `weight` and `bias`.
    """

    @abstractmethod
    def arrangement(self, module: nn.Module, weight: slice | None, bias: slice | None) -> Arrangement:
        """Slices of the parameters, and how the weight tensor becomes W (q, o, i)."""

    @abstractmethod
    def inputs(self, module: nn.Module, x: Tensor, n: int) -> Tensor:
        """The layer's input as a (n, r, q, i), without the bias column."""

    @abstractmethod
    def gradients(self, module: nn.Module, g: Tensor, n: int) -> Tensor:
        """A gradient with respect to the layer's output as (n, r, q, o), positions in the order of `inputs`."""

    def blocks(
        self, calls: Calls, gradients: Sequence[Sequence[Tensor]], where: Mapping[str, slice], n: int
    ) -> list[Block]:
        module = calls.module
        arrangement = self.arrangement(module, where.get("weight"), where.get("bias"))
        if not calls.outputs:  # not called for these data: zero positions
            return [empty_block(arrangement, next(module.parameters(recurse=False)), n, len(gradients))]
        columns = [joined([self.gradients(module, g, n) for g in column]) for column in gradients]
        return [factor_block(arrangement, self.captured(module, tuple(calls.inputs), n, arrangement), columns)]

    def captured(self, module: nn.Module, calls: tuple[Tensor, ...], n: int, arrangement: Arrangement) -> Inputs:
        """The inputs of all calls as a lazy `Inputs`; override if a more compact form than `inputs` exists."""
        return Formed(arrangement, lambda: [self.inputs(module, x, n) for x in calls])


class DirectRule(Rule):
    """A rule for layers with few parameters: the gradient of every datum is computed explicitly (a dense block)."""

    def prepared(self, module: nn.Module, x: Tensor) -> Tensor:
        """A function of the input that `rows` needs, computed once for all columns; by default the input itself."""
        return x

    @abstractmethod
    def rows(self, module: nn.Module, x: Tensor, g: Tensor, n: int) -> Mapping[str, Tensor]:
        """For every parameter, by its own name, (∂s/∂p)ᵀ g summed over the positions of each datum: (n, *shape).

        `x` is the prepared input, `g` the gradient with respect to the output s.
        """

    def blocks(
        self, calls: Calls, gradients: Sequence[Sequence[Tensor]], where: Mapping[str, slice], n: int
    ) -> list[Block]:
        columns: list[dict[str, Tensor]] = []
        if not calls.prepared:
            calls.prepared = [self.prepared(calls.module, x) for x in calls.inputs]
        for column in gradients:
            total: dict[str, Tensor] = {}
            for x, g in zip(calls.prepared, column, strict=True):
                for name, rows in self.rows(calls.module, x, g, n).items():
                    total[name] = total[name] + rows if name in total else rows
            columns.append(total)
        blocks: list[Block] = []
        for name, place in where.items():
            size = place.stop - place.start
            empty = next(calls.module.parameters(recurse=False)).new_zeros(n, size)
            stacked = [total[name].reshape(n, size) if name in total else empty for total in columns]
            blocks.append(DenseBlock(place, torch.stack(stacked, dim=1)))
        return blocks


@dataclass(frozen=True, eq=False)
class Formed(Inputs):
    """Inputs computed on first access: `form` returns (n, r, q, i) per call, without the bias column."""

    arrangement: Arrangement
    form: Callable[[], list[Tensor]]

    @property
    def attached(self) -> bool:
        return self._joined.requires_grad

    def tensor(self) -> Tensor:
        return with_bias(self.arrangement, self._joined)

    def columns(self) -> tuple[Tensor, bool]:
        alone = replace(self.arrangement, bias=None)
        return with_bias(alone, self._joined), self.arrangement.bias is not None

    def split(self, n: int, step: int) -> list[Inputs]:
        return [Formed(self.arrangement, lambda some=some: [some]) for some in self._joined.split(step)]  # type: ignore[misc]

    def fresh(self) -> Formed:
        return replace(self)

    def at(self, data: slice) -> Formed:
        return Formed(self.arrangement, lambda: [self._joined[data]])

    def without_bias(self) -> Formed:
        return Formed(replace(self.arrangement, bias=None), lambda: [self._joined])

    @cached_property
    def _joined(self) -> Tensor:
        return joined(self.form())


def with_bias(arrangement: Arrangement, a: Tensor) -> Tensor:
    """Append the bias column of ones to inputs (…, i); only that column if the weight is not inferred."""
    if arrangement.weight is None:
        a = a[..., :0]
    return a if arrangement.bias is None else torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)


def factor_block(arrangement: Arrangement, inputs: Inputs, columns: Sequence[Tensor]) -> FactorBlock:
    """A FactorBlock from inputs and, for each output, the gradients (n, r, q, o) of all calls."""
    return FactorBlock(arrangement, _stacked(columns), inputs)


def _stacked(columns: Sequence[Tensor]) -> Tensor:
    """Stack gradients to (n, c, r, q, o), in a memory layout in which Σ_t g_t a_tᵀ needs no copy.

    That is (n, r, c, q, o), or (n, c, q, o, r) if positions are contiguous, as in images with channels first.
    """
    if len(columns) == 1:
        return columns[0][:, None]
    if positions_last(columns[0]):
        return torch.stack([column.permute(0, 2, 3, 1) for column in columns], dim=1).permute(0, 1, 4, 2, 3)
    return torch.stack(list(columns), dim=2).transpose(1, 2)


def positions_last(g: Tensor) -> bool:
    """Whether positions r, not outputs o, are contiguous in memory in (…, r, q, o)."""
    return g.shape[-3] > 1 and g.stride(-3) == 1 and g.stride(-1) != 1


def empty_block(arrangement: Arrangement, like: Tensor, n: int, c: int) -> FactorBlock:
    """The block of a layer that was not called for these data: zero positions, so J = 0."""
    a = like.new_zeros(n, 0, arrangement.q, arrangement.i)
    return FactorBlock(arrangement, like.new_zeros(n, c, 0, arrangement.q, arrangement.o), Given(a))


def called_densely(calls: Calls, n: int) -> bool:
    """Whether a layer with factors was called once, with one position per datum."""
    plain = isinstance(calls.rule, FactorRule) and type(calls.rule).blocks is FactorRule.blocks
    return plain and len(calls.outputs) == 1 and calls.outputs[0].shape[:-1] == (n,)


def joined(calls: list[Tensor]) -> Tensor:
    """Concatenate the positions of all calls."""
    return calls[0] if len(calls) == 1 else torch.cat(calls, dim=1)


def summed_over_positions(v: Tensor, n: int, shape: torch.Size) -> Tensor:
    """(n, …, *shape) → (n, *shape)."""
    return v.reshape(n, -1, *shape).sum(1)


def _keep(calls: Calls) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        calls.keep(args[0] if args else kwargs["input"], output)
        # Return a copy: an in-place activation after the layer would overwrite the output that we differentiate by.
        return output.clone()

    return hook
