"""A network at some weights and inputs, where it can be rescaled and run; its normalisations are watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.data import ModelInput
from lapwing.errors import ModelError
from lapwing.network.module import Network
from lapwing.priors.normalised.calls import NormCall, Rescaled, Treatment, Watch, as_it_is

Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Point:
    """Weights and inputs at which invariance is tested; its passes are watched. Use inside `borrowed`."""

    network: Network
    x: ModelInput
    path: Callable[[], str]  # the module at work

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All real parameters, frozen ones too."""
        tensors = self.network.tensors
        return tuple(n for n in tensors if n not in self.network.buffers and tensors[n].is_floating_point())

    @cached_property
    def tolerance(self) -> float:
        return 1e-7 if self.network.dtype == torch.float64 else 1e-3

    def run(self, treat: Treatment, tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[NormCall]]:
        with Watch(treat, self.path) as watch:
            f = self.network(self.x, tensors)
        return f, watch.calls

    @cached_property
    def reference(self) -> tuple[Tensor, list[NormCall]]:
        with torch.no_grad():
            return self.run(as_it_is, {})

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.reference[0]).all())

    def change(self, factors: Mapping[Names, float]) -> tuple[float, Rescaled]:
        """‖f − f₀‖ / ‖f₀‖ when each group is multiplied by its factor and the norms follow, and which of them did."""
        treat = Rescaled(list(factors.values()), self.reference[1], self.tolerance)
        tensors = {name: k * self.network.tensors[name] for names, k in factors.items() for name in names}
        f = self.reference[0].double()
        with torch.no_grad():
            moved = self.run(treat, tensors)[0].double()
        return float((moved - f).norm() / (f.norm() + 1e-300)), treat


def point_at(network: Network, x: ModelInput, path: Callable[[], str]) -> Point:
    return Point(network, network.placed(x), path)


def in_double(network: Network, few: ModelInput) -> Network:
    """The network in float64, or as it is when its own code insists on its dtype."""
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in network.tensors.items()}
    double = replace(network, tensors=tensors)
    try:
        with torch.no_grad():
            double(double.placed(few), {})
    except ModelError:
        return network
    return double


def moved_point(point: Point) -> Point:
    """Weights moved by a tenth of their size and inputs by half of their spread; only the weights if that fails."""
    generator = torch.Generator().manual_seed(0)
    tensors = dict(point.network.tensors)
    for name in point.names:
        old = tensors[name]
        tensors[name] = old + 0.1 * (_rms(old) + 0.1) * noise(old, generator)
    for name, row in _padding_rows(point.network.model):
        alias = point.network.aliases.get(name, name)
        tensors[alias][row] = point.network.tensors[alias][row]
    network = replace(point.network, tensors=tensors)

    def shaken(v: Any) -> Any:
        if not point.x.batched(v) or not v.is_floating_point():
            return v
        finite = v[torch.isfinite(v)]
        spread = float(finite.std()) if finite.numel() > 1 else 0.0
        return v + (0.5 * spread + 0.1) * noise(v, generator)

    for x in (point.x.mapped(shaken, point.x.n), point.x):
        candidate = Point(network, x, point.path)
        try:
            if candidate.is_finite:
                return candidate
        except ModelError:  # some inputs are not free to move: fractions, masks, angles
            continue
    return point


def _padding_rows(model: nn.Module) -> list[tuple[str, int]]:
    """Rows of embeddings whose gradient autograd leaves out: moved, they would spoil J_g θ_g = 0."""
    tables = ((path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding))
    return [(f"{path}.weight" if path else "weight", m.padding_idx) for path, m in tables if m.padding_idx is not None]


def noise(t: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)


def _rms(t: Tensor) -> float:
    return float(t.double().norm()) / max(t.numel(), 1) ** 0.5


def tracked_modules(model: nn.Module) -> Callable[[], str]:
    """A function that tells which module is at work; the hooks go when the model is given back."""
    stack: list[str] = []

    def leave(*_: Any) -> None:
        del stack[-1:]  # a hook of the user may have raised before ours was reached

    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(lambda *_, path=path: stack.append(path))
            module.register_forward_hook(leave, always_call=True)
    return lambda: stack[-1] if stack else ""
