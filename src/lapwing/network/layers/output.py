"""The output layer, whose output s is the network's output f: ∂f/∂s is the identity, so no backward pass is needed.

The rule check determines by reverse mode which layer this is, if any. Every forward pass compares the values again.
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
    """The recorded call of a module whose output is f up to a reshape."""

    calls: Calls
    rule: FactorRule
    where: Mapping[str, slice]
    n: int
    _formed: list[Inputs] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, calls: Calls, where: Mapping[str, slice], f: Float[Tensor, "n k"]) -> OutputLayer | None:
        """None if the layer has no factor rule, was called several times, or its output is not f for these data."""
        rule = calls.rule
        if not isinstance(rule, FactorRule) or type(rule).blocks is not FactorRule.blocks:
            return None
        if len(calls.outputs) != 1 or not _same_values(calls.outputs[0], f):
            return None
        return cls(calls, rule, where, len(f))

    def rows(self, cotangents: Float[Tensor, "n k c"]) -> FactorBlock:
        """The block of u_cᵀ J, whose gradients g are the cotangents themselves."""
        s = self.calls.outputs[0]
        gradients = [[u.reshape(s.shape).to(s.dtype)] for u in cotangents.unbind(-1)]
        (block,) = self.rule.blocks(self.calls, gradients, self.where, self.n)
        assert isinstance(block, FactorBlock)
        return replace(block, inputs=self._inputs(block))

    def block(self) -> OutputBlock:
        """The block of J with an implicit identity as gradient; its rows are in the order `order` of f."""
        s = self.calls.outputs[0]
        rows = self.rows(s.new_zeros(()).expand(self.n, s.numel() // self.n, 1))
        return OutputBlock(rows.arrangement, rows.inputs)

    def _inputs(self, block: FactorBlock) -> Inputs:
        """The inputs, computed once and shared by all blocks of this call."""
        if not self._formed:
            self._formed.append(block.inputs if isinstance(block.inputs, Formed) else Given(block.a))
        return self._formed[0]

    @cached_property
    def order(self) -> Float[Tensor, "r o"]:
        """The index in f of every output at every position, found by passing the indices through the rule.

        Empty if the layer has several parallel maps.
        """
        s = self.calls.outputs[0]
        numbers = torch.arange(s.numel() // self.n, dtype=torch.float64, device=s.device)
        positions = self._positions(numbers.reshape(-1, *s.shape[1:]), 1)[0]
        return positions[:, 0] if positions.shape[1] == 1 else positions.new_zeros(0, 0)

    def _positions(self, g: Tensor, n: int) -> Float[Tensor, "n r q o"]:
        return self.rule.gradients(self.calls.module, g, n)


def _same_values(s: Tensor, f: Tensor) -> bool:
    return s.dtype == f.dtype and s.numel() == f.numel() and torch.equal(s.detach().reshape(f.shape), f.detach())
