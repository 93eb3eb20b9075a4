"""The prior of training: a standard deviation per tensor, from its fan-in, or what the user says."""

from __future__ import annotations

from math import prod
from numbers import Real
from typing import Any

import torch
from torch import nn

from lapwing import priors
from lapwing.errors import InputError, InputTypeError
from lapwing.network.parameters import ParamLayout, owner
from lapwing.priors import GaussianPrior
from lapwing.runtime.arguments import choose

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def training_prior(word: Any, model: nn.Module, layout: ParamLayout) -> GaussianPrior:
    """`word`: "fan_in", "iso" (one), a standard deviation, or lw.prior(model, ...)."""
    if isinstance(word, GaussianPrior):
        return word.restricted(layout)
    if isinstance(word, Real) and not isinstance(word, bool):
        return _tensorwise(layout, [_positive(float(word))] * len(layout.names))
    if not isinstance(word, str):
        raise InputTypeError(
            'prior: expected "fan_in", a standard deviation (one number) or lw.prior(model, ...), got '
            f"{type(word).__name__}."
        )
    return choose("prior", word, {"fan_in": _by_fan_in, "iso": _of_one})(model, layout)


def _by_fan_in(model: nn.Module, layout: ParamLayout) -> GaussianPrior:
    """s² = 1 / fan-in for weights; 1 for biases, norms' scales and shifts, and embeddings, whose input is one-hot."""
    return _tensorwise(layout, [fan_in(model, name, layout.shape(name)) ** -0.5 for name in layout.names])


def _of_one(model: nn.Module, layout: ParamLayout) -> GaussianPrior:
    return _tensorwise(layout, [1.0] * len(layout.names))


def fan_in(model: nn.Module, name: str, shape: tuple[int, ...]) -> int:
    """How many inputs a weight's output adds up; of a tensor that several modules share, the most."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensor = tensors[name]
    holders = [model.get_submodule(owner(other)) for other, t in tensors.items() if t is tensor]
    return max(1, *(_of_holder(module, shape) for module in holders)) if len(shape) > 1 else 1


def _of_holder(module: nn.Module, shape: tuple[int, ...]) -> int:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1
    if isinstance(module, _TRANSPOSED):  # (in, out / groups, *kernel)
        return shape[0] // module.groups * prod(shape[2:])
    return prod(shape[1:])


def _tensorwise(layout: ParamLayout, stds: list[float]) -> GaussianPrior:
    return priors.tensorwise(layout, torch.tensor(stds, dtype=torch.float64) ** -2)


def _positive(std: float) -> float:
    if not 0 < std < float("inf"):
        raise InputError(f"prior: expected a positive, finite standard deviation, got {std!r}.")
    return std
