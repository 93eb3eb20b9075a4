"""A quick test for networks without normalisation: sequences of plain layers."""

from __future__ import annotations

from torch import nn

_PLAIN = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.Flatten, nn.Unflatten, nn.Identity),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.PReLU, nn.Dropout),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)


def cannot_normalise(model: nn.Module) -> bool:
    """Whether the model is a sequence of plain layers without hooks or parametrisations, so no search is needed."""
    return all(_is_plain(module) for module in model.modules())


def _is_plain(module: nn.Module) -> bool:
    untouched = not module._forward_hooks and not module._forward_pre_hooks and not hasattr(module, "parametrizations")
    return untouched and type(module) in (nn.Sequential, *_PLAIN)
