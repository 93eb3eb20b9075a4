"""Normalised groups from the torch.fx graph alone, for a network that cannot be run: candidates without a test.

A layer is a candidate if its output is used only by a normalisation layer, through operations that are homogeneous in
scale. Sums are not followed: whether all branches of a residual stream are normalised together needs a numerical test.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from lapwing.network.module import Network
from lapwing.network.parameters import ParamLayout
from lapwing.priors.normalised.groups import GroupEvidence, NormalisedGroup

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_PASSING = (
    nn.ReLU, nn.LeakyReLU, nn.Identity, nn.Dropout, nn.Dropout2d, nn.Flatten, nn.Unflatten, nn.MaxPool1d, nn.MaxPool2d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d,
)  # fmt: skip
_PASSING_FUNCTIONS = frozenset({F.relu, F.leaky_relu, F.dropout, F.max_pool2d, F.avg_pool2d, torch.relu, torch.flatten})
_PASSING_METHODS = frozenset({"view", "reshape", "flatten", "permute", "transpose", "contiguous", "unsqueeze", "relu"})


def structural_groups(network: Network, layout: ParamLayout) -> tuple[NormalisedGroup, ...]:
    """One group per layer whose output only a norm uses; empty if the model cannot be traced."""
    with network.borrowed() as own:
        try:
            graph = fx.Tracer().trace(own.model)
        except Exception:  # torch.fx fails in many ways (control flow, dynamic shapes); there is no other method left
            return ()
        modules = dict(own.model.named_modules())
        called = [node.target for node in graph.nodes if node.op == "call_module"]
        pairs = [(_writer(node, modules), node) for node in graph.nodes if _is(node, modules, _NORMS)]
        found = [(str(w.target), str(n.target)) for w, n in pairs if w is not None and called.count(w.target) == 1]
    groups = [_group(path, norm, network, layout) for path, norm in found]
    return tuple(group for group in groups if group.names)


def _writer(norm: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The layer whose output is used by this norm only."""
    node: Any = norm.args[0] if norm.args else None
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if _is(node, modules, (nn.Linear, _ConvNd)):
            return node
        passes = (
            _is(node, modules, _PASSING)
            or (node.op == "call_function" and node.target in _PASSING_FUNCTIONS)
            or (node.op == "call_function" and node.target is operator.getitem)
            or (node.op == "call_method" and node.target in _PASSING_METHODS)
        )
        node = node.args[0] if passes and node.args else None
    return None


def _is(node: fx.Node, modules: dict[str, nn.Module], kinds: tuple[type, ...]) -> bool:
    return node.op == "call_module" and isinstance(modules[str(node.target)], kinds)


def _group(path: str, norm: str, network: Network, layout: ParamLayout) -> NormalisedGroup:
    own = {network.aliases[f"{path}.{key}"] for key, _ in network.model.get_submodule(path).named_parameters()}
    kind = type(network.model.get_submodule(norm)).__name__
    evidence = GroupEvidence(None, None, None, (f"{norm} ({kind})",))
    return NormalisedGroup(tuple(name for name in layout.names if name in own), "structural", evidence)
