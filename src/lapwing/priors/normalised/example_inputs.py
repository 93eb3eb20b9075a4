"""Example inputs for a network without data, guessed from the first layer that determines an input shape."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lapwing.data import ModelInput
from lapwing.errors import LapwingError
from lapwing.network.module import Network

_N = 8
_LENGTHS = (8, 5, 3, 16, 2, 1, 32)  # sequence lengths to try
_SIDES = (32, 28, 8, 64, 16, 224, 96, 12)  # side lengths of signals, images and volumes to try


def example_input(network: Network) -> ModelInput | None:
    """The first guess for which the network runs and gives finite outputs, one row per datum; None if there is none."""
    with network.borrowed() as own, torch.no_grad():
        return next((x for x in _guesses(own.model) if _runs(own, x)), None)


def _runs(network: Network, x: ModelInput) -> bool:
    try:
        f = network(network.placed(x), {})
    except LapwingError:
        return False
    return f.ndim > 0 and f.shape[0] == x.n and f.is_floating_point() and bool(torch.isfinite(f).all())


def _guesses(model: nn.Module) -> Iterator[ModelInput]:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        shapes = list(_shapes(module))
        for shape in shapes:
            if isinstance(module, nn.Embedding):
                values: Tensor = torch.randint(module.num_embeddings, (_N, *shape), generator=generator)
            else:
                values = torch.randn(_N, *shape, generator=generator)
            yield ModelInput((values,), {}, _N)
        if shapes:
            return


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    """Candidate shapes of one datum for a layer of this kind."""
    if isinstance(module, nn.Embedding):
        yield from [*((length,) for length in _LENGTHS), ()]
    elif isinstance(module, nn.Linear):
        yield (module.in_features,)
        yield from ((length, module.in_features) for length in _LENGTHS)
    elif isinstance(module, _ConvNd):
        yield from ((module.in_channels, *[side] * len(module.kernel_size)) for side in _SIDES)
    elif isinstance(module, nn.RNNBase):
        yield from ((length, module.input_size) for length in _LENGTHS)
    elif isinstance(module, nn.MultiheadAttention):
        yield from ((length, module.embed_dim) for length in _LENGTHS)
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        yield tuple(module.normalized_shape)
        yield from ((length, *module.normalized_shape) for length in _LENGTHS)
    elif isinstance(module, _BatchNorm):
        yield from [(module.num_features,), *((module.num_features, *[side] * 2) for side in _SIDES)]
