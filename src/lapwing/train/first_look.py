"""What is found out about a model on the first batch, on a copy, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.api import words
from lapwing.api.fit import check_class_axis_of
from lapwing.data import ModelInput
from lapwing.data.targets import ragged
from lapwing.likelihoods import Likelihood, Sites
from lapwing.network.module import Network, check_outputs
from lapwing.train.activations import Piecewise

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, eq=False)
class FirstLook:
    """The likelihood a word means, whether attention is used, and how layers were called."""

    family: Likelihood
    sites: Sites
    attends: bool
    calls: Mapping[str, tuple[int, ...]]  # path of a layer → the number of axes of its input, one for each call
    piecewise: Piecewise

    @classmethod
    def at(cls, model: nn.Module, x: ModelInput, likelihood: str | Likelihood) -> FirstLook:
        watch = Piecewise()
        with watch:
            network, few, output = Network.tried(model, x)
        shape = check_outputs(output, few.n)
        family = words.likelihood(likelihood, shape)
        check_class_axis_of(family, shape)
        return cls(family, Sites(shape, family.class_axis), network.traits.attends, _calls(network, few), watch)

    def sites_of(self, y: Any) -> Sites:
        """How outputs split into terms; a batch may have other numbers of positions, one label each."""
        if not ragged(self.family, self.sites) or not isinstance(y, Tensor) or y.ndim != 2:
            return self.sites
        return Sites(self.sites.with_positions(y.shape[1]), self.sites.class_axis)


def _calls(network: Network, few: ModelInput) -> dict[str, tuple[int, ...]]:
    seen: dict[str, tuple[int, ...]] = {}

    def note(path: str, args: tuple[object, ...]) -> None:
        axes = args[0].ndim if args and isinstance(args[0], torch.Tensor) else 0
        seen[path] = (*seen.get(path, ()), axes)

    with network.borrowed() as own, torch.no_grad():  # the hooks go with the copy
        for path, module in own.model.named_modules():
            if isinstance(module, _LAYERS):
                module.register_forward_pre_hook(lambda _, args, path=path: note(path, args))
        own(few, {})
    return seen
