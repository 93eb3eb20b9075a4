"""What a rule for a kind of layer must say."""

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
    """The inputs and outputs of one module, a pair per call in the forward pass.

    A module that computes several maps says which map a pair belongs to; others leave the name empty.
    """

    module: nn.Module
    rule: Rule
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)
    prepared: list[Tensor] = field(default_factory=list)  # what a DirectRule made of the inputs
    open: bool = True
    attached: bool = False  # whether blocks are to be differentiable in the network's inputs

    def keep(self, x: Tensor, output: Tensor, of: str = "") -> None:
        if self.open:
            self.inputs.append(x if self.attached else x.detach())
            if self.attached and not output.requires_grad:  # nothing differentiable goes in: weights have no graph
                output.requires_grad_()
            self.outputs.append(output)
            self.maps.append(of)

    def close(self) -> None:
        self.open = False

    def divide(self, n: int) -> bool:
        """Whether the inputs of all calls can be told apart by datum."""
        return all(self.rule.divides(self.module, x, n) for x in self.inputs)

    def of(self, name: str, gradients: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Inputs of one map, and the gradients [column][call] that go with them."""
        calls = [j for j, map_ in enumerate(self.maps) if map_ == name]
        return [self.inputs[j] for j in calls], [[column[j] for j in calls] for column in gradients]


class Rule(ABC):
    """Knows one kind of module, and no more: a rule applies only to the forward it was written for."""

    parameters: frozenset[str] = frozenset({"weight", "bias"})  # what the module may hold for the rule to know it all

    @abstractmethod
    def applies(self, module: nn.Module) -> bool: ...

    def divides(self, module: nn.Module, x: Tensor, n: int) -> bool:
        """Whether an input can be told apart by datum: the batch, or batch times more, comes first."""
        return x.ndim > 1 and x.shape[0] % n == 0

    def watch(self, calls: Calls) -> Callable[[], None]:
        """Have the calls of a borrowed module kept; returns what ends it."""
        return calls.module.register_forward_hook(_keep(calls), with_kwargs=True).remove

    @abstractmethod
    def blocks(
        self, calls: Calls, gradients: Sequence[Sequence[Tensor]], where: Mapping[str, slice], n: int
    ) -> list[Block]:
        """The module's columns of J. gradients[c][j]: of output c with respect to call j's output.

        `where` says, by their own names, where the inferred tensors of the module stand.
        """


class RewrittenRule(Rule):
    """A module that never calls its maps as modules: while borrowed, it computes the same by a forward that does."""

    @abstractmethod
    def forward(self, module: nn.Module, calls: Calls) -> Callable[..., Any]:
        """The equivalent of the module's own forward; it keeps its maps' inputs and outputs."""

    def watch(self, calls: Calls) -> Callable[[], None]:
        # The forward stays until the module is given back: a checkpointed block must repeat what it computed.
        calls.module.__dict__["forward"] = self.forward(calls.module, calls)
        return calls.close


class FactorRule(Rule):
    """The layer computes s_t = W a_t + b at positions t, for q parallel maps: its Jacobian block is factored.

    The layer's parameters must be called `weight` and `bias`.
    """

    @abstractmethod
    def arrangement(self, module: nn.Module, weight: slice | None, bias: slice | None) -> Arrangement:
        """Where the parameters stand, and how the weight is W (q, o, i)."""

    @abstractmethod
    def inputs(self, module: nn.Module, x: Tensor, n: int) -> Tensor:
        """The layer's input as a (n, r, q, i), without the bias column."""

    @abstractmethod
    def gradients(self, module: nn.Module, g: Tensor, n: int) -> Tensor:
        """A gradient with respect to the layer's output as (n, r, q, o), positions in the same order."""

    def blocks(
        self, calls: Calls, gradients: Sequence[Sequence[Tensor]], where: Mapping[str, slice], n: int
    ) -> list[Block]:
        module = calls.module
        arrangement = self.arrangement(module, where.get("weight"), where.get("bias"))
        if not calls.outputs:  # not called for these data: no positions, no effect
            return [empty_block(arrangement, next(module.parameters(recurse=False)), n, len(gradients))]
        columns = [joined([self.gradients(module, g, n) for g in column]) for column in gradients]
        return [factor_block(arrangement, self.captured(module, tuple(calls.inputs), n, arrangement), columns)]

    def captured(self, module: nn.Module, calls: tuple[Tensor, ...], n: int, arrangement: Arrangement) -> Inputs:
        """The inputs of all calls; a rule whose `inputs` take much memory may have a better way to keep them."""
        return Formed(arrangement, lambda: [self.inputs(module, x, n) for x in calls])


class DirectRule(Rule):
    """A layer whose parameters are few: the gradient of each datum is written down directly."""

    def prepared(self, module: nn.Module, x: Tensor) -> Tensor:
        """What `rows` needs of the input, computed once for all columns; the input itself unless said otherwise."""
        return x

    @abstractmethod
    def rows(self, module: nn.Module, x: Tensor, g: Tensor, n: int) -> Mapping[str, Tensor]:
        """For each parameter by its own name, Σ over the datum's positions of ∂s/∂p · g: (n, *shape).

        `x` is the prepared input.
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
    """Inputs (n, r, q, i) per call, without the bias column, formed when first needed."""

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
    """Inputs (…, i) as the arrangement has them: ones for the bias, no others if only the bias is inferred."""
    if arrangement.weight is None:
        a = a[..., :0]
    return a if arrangement.bias is None else torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)


def factor_block(arrangement: Arrangement, inputs: Inputs, columns: Sequence[Tensor]) -> FactorBlock:
    """Inputs and, per output, the gradients (n, r, q, o) of all calls."""
    return FactorBlock(arrangement, _stacked(columns), inputs)


def _stacked(columns: Sequence[Tensor]) -> Tensor:
    """(n, c, r, q, o), laid out so that Σ_t g_t a_tᵀ is a product of matrices as they stand.

    That is (n, r, c, q, o) in memory; or (n, c, q, o, r) if the columns have their positions last, as images do.
    """
    if len(columns) == 1:
        return columns[0][:, None]
    if positions_last(columns[0]):
        return torch.stack([column.permute(0, 2, 3, 1) for column in columns], dim=1).permute(0, 1, 4, 2, 3)
    return torch.stack(list(columns), dim=2).transpose(1, 2)


def positions_last(g: Tensor) -> bool:
    """Whether neighbours in memory of (…, r, q, o) are positions, not outputs."""
    return g.shape[-3] > 1 and g.stride(-3) == 1 and g.stride(-1) != 1


def empty_block(arrangement: Arrangement, like: Tensor, n: int, c: int) -> FactorBlock:
    """The block of a layer that some data never reach."""
    a = like.new_zeros(n, 0, arrangement.q, arrangement.i)
    return FactorBlock(arrangement, like.new_zeros(n, c, 0, arrangement.q, arrangement.o), Given(a))


def called_densely(calls: Calls, n: int) -> bool:
    """Whether a linear layer was called once, at one position of each datum."""
    plain = isinstance(calls.rule, FactorRule) and type(calls.rule).blocks is FactorRule.blocks
    return plain and len(calls.outputs) == 1 and calls.outputs[0].shape[:-1] == (n,)


def joined(calls: list[Tensor]) -> Tensor:
    """The positions of all calls, one after the other."""
    return calls[0] if len(calls) == 1 else torch.cat(calls, dim=1)


def summed_over_positions(v: Tensor, n: int, shape: torch.Size) -> Tensor:
    """(n, …, *shape) → (n, *shape)."""
    return v.reshape(n, -1, *shape).sum(1)


def _keep(calls: Calls) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        calls.keep(args[0] if args else kwargs["input"], output)
        # The next layer gets a copy, so that an in-place activation cannot overwrite what we differentiate by.
        return output.clone()

    return hook
