"""Layer rules: the Jacobian block of a layer from its captured inputs and output gradients."""

from lapwing.network.layers.base import (
    Calls,
    DirectRule,
    FactorRule,
    RewrittenRule,
    Rule,
    called_densely,
    summed_over_positions,
)
from lapwing.network.layers.capture import captured_blocks, places, pulled_back, recording, vjp
from lapwing.network.layers.output import OutputLayer
from lapwing.network.layers.rules import register_rule, rule_for, ruled_modules

__all__ = [
    "Calls",
    "DirectRule",
    "FactorRule",
    "OutputLayer",
    "RewrittenRule",
    "Rule",
    "called_densely",
    "captured_blocks",
    "places",
    "pulled_back",
    "recording",
    "register_rule",
    "rule_for",
    "ruled_modules",
    "summed_over_positions",
    "vjp",
]
