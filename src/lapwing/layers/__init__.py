"""Rules for kinds of layers: how their Jacobian block comes out of one captured forward pass."""

from torch import nn

from lapwing.layers import linear
from lapwing.layers.capture import Calls, linear_blocks, recording
from lapwing.params import ParamLayout

__all__ = ["Calls", "linear_blocks", "recording", "ruled_modules"]


def ruled_modules(model: nn.Module, layout: ParamLayout) -> dict[str, nn.Module]:
    """Modules with a rule that hold inferred parameters, and share them with no other module."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    return {
        path: module
        for path, module in model.named_modules()
        if path in layout.modules
        and linear.applies(module)
        and {name.rpartition(".")[2] for name in layout.modules[path]} <= {"weight", "bias"}  # not weight_g, weight_v
        and all(owners[id(p)] == 1 for p in module.parameters(recurse=False))
    }
