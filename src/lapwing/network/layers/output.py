"""The layer whose output is the network's own: ∂f/∂s is the identity, so nothing has to be pulled back to it.

Which layer that is, if any, the probe finds out by reverse mode; and every forward pass shows whether it still is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lapwing._types import Float, Tensor
from lapwing.network.jacobian import FactorBlock, Given, Inputs, OutputBlock
from lapwing.network.layers.base import Calls, FactorRule, Formed


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The record of a module's one call, whose output is f up to its shape."""

    calls: Calls
    rule: FactorRule
    where: Mapping[str, slice]
    n: int
    _formed: list[Inputs] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, calls: Calls, where: Mapping[str, slice], f: Float[Tensor, "n k"]) -> OutputLayer | None:
        """None when the layer has no rule of the kind, or f is something else, for these data at least."""
        rule = calls.rule
        if not isinstance(rule, FactorRule) or type(rule).blocks is not FactorRule.blocks:
            return None
        if len(calls.outputs) != 1 or not _same_values(calls.outputs[0], f):
            return None
        return cls(calls, rule, where, len(f))

    def rows(self, cotangents: Float[Tensor, "n k c"]) -> FactorBlock:
        """The block of u_cᵀ J: its gradients are the cotangents themselves."""
        s = self.calls.outputs[0]
        gradients = [[u.reshape(s.shape).to(s.dtype)] for u in cotangents.unbind(-1)]
        (block,) = self.rule.blocks(self.calls, gradients, self.where, self.n)
        assert isinstance(block, FactorBlock)
        return replace(block, inputs=self._inputs(block))

    def block(self) -> OutputBlock:
        """The block of J itself, the identity left implicit; rows in the order of `order`."""
        s = self.calls.outputs[0]
        rows = self.rows(s.new_zeros(()).expand(self.n, s.numel() // self.n, 1))
        return OutputBlock(rows.arrangement, rows.inputs)

    def _inputs(self, block: FactorBlock) -> Inputs:
        """The inputs, formed once for all blocks; those of a dense layer are there already."""
        if not self._formed:
            self._formed.append(block.inputs if isinstance(block.inputs, Formed) else Given(block.a))
        return self._formed[0]

    @cached_property
    def order(self) -> Float[Tensor, "r o"]:
        """Which entry of f each output at each position is: the entries' numbers, through the rule.

        Empty when the layer is several maps side by side.
        """
        s = self.calls.outputs[0]
        numbers = torch.arange(s.numel() // self.n, dtype=torch.float64, device=s.device)
        positions = self._positions(numbers.reshape(-1, *s.shape[1:]), 1)[0]
        return positions[:, 0] if positions.shape[1] == 1 else positions.new_zeros(0, 0)

    def _positions(self, g: Tensor, n: int) -> Float[Tensor, "n r q o"]:
        return self.rule.gradients(self.calls.module, g, n)


def _same_values(s: Tensor, f: Tensor) -> bool:
    return s.dtype == f.dtype and s.numel() == f.numel() and torch.equal(s.detach().reshape(f.shape), f.detach())
