"""Rules for kinds of layers: how their Jacobian block comes out of one captured forward pass."""

from lapwing.layers.base import Calls, DirectRule, FactorRule, RewrittenRule, Rule, summed_over_positions
from lapwing.layers.capture import captured_blocks, recording
from lapwing.layers.rules import register_rule, rule_for, ruled_modules

__all__ = [
    "Calls",
    "DirectRule",
    "FactorRule",
    "RewrittenRule",
    "Rule",
    "captured_blocks",
    "recording",
    "register_rule",
    "rule_for",
    "ruled_modules",
    "summed_over_positions",
]
