"""The list of layer rules, in the order in which they are tried."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lapwing.errors import InputTypeError
from lapwing.network.layers.attention import AttentionRule
from lapwing.network.layers.base import Rule
from lapwing.network.layers.convolution import ConvolutionRule, TransposedConvolutionRule
from lapwing.network.layers.embedding import EmbeddingRule
from lapwing.network.layers.linear import LinearRule, TransposedLinearRule
from lapwing.network.layers.normalisation import ChannelNormRule, TrailingNormRule
from lapwing.network.layers.prelu import PReLURule
from lapwing.network.parameters import ParamLayout

_rules: list[Rule] = [
    LinearRule(),
    TransposedLinearRule(),
    ConvolutionRule(),
    TransposedConvolutionRule(),
    TrailingNormRule(),
    ChannelNormRule(),
    PReLURule(),
    EmbeddingRule(),
    AttentionRule(),
]


def register_rule(rule: Rule) -> None:
    """Register a rule for a custom layer. It is tried first, and checked against reverse-mode AD in every fit."""
    if not isinstance(rule, Rule):
        raise InputTypeError(
            f"register_rule: expected an instance of a FactorRule or DirectRule subclass, got {type(rule).__name__}."
        )
    _rules.insert(0, rule)


def rule_for(module: nn.Module) -> Rule | None:
    if is_parametrized(module):  # the weight is computed from other parameters, which the rule does not know
        return None
    return next((rule for rule in _rules if rule.applies(module)), None)


def ruled_modules(model: nn.Module, layout: ParamLayout) -> dict[str, nn.Module]:
    """Modules that have a rule, and hold inferred parameters that are not tied to another module."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    return {
        path: module
        for path, module in model.named_modules()
        if path in layout.modules
        and (rule := rule_for(module)) is not None
        and {name.rpartition(".")[2] for name in layout.modules[path]} <= rule.parameters  # not weight_g, weight_v
        and all(owners[id(p)] == 1 for p in module.parameters(recurse=False))
    }
