"""A network at given weights and inputs, at which groups can be rescaled; records its normalisations."""

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
from lapwing.priors.normalised.calls import NormCall, NormWatcher, Rescaled, Treatment, unchanged

Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Point:
    """Weights and inputs at which scale invariance is tested. Use inside `Network.borrowed`."""

    network: Network
    x: ModelInput
    path: Callable[[], str]  # returns the path of the module that is running

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all floating-point parameters, frozen ones included."""
        tensors = self.network.tensors
        return tuple(n for n in tensors if n not in self.network.buffers and tensors[n].is_floating_point())

    @cached_property
    def tolerance(self) -> float:
        return 1e-7 if self.network.dtype == torch.float64 else 1e-3

    def run(self, treat: Treatment, tensors: Mapping[str, Tensor]) -> tuple[Tensor, list[NormCall]]:
        with NormWatcher(treat, self.path) as watch:
            f = self.network(self.x, tensors)
        return f, watch.calls

    @cached_property
    def reference(self) -> tuple[Tensor, list[NormCall]]:
        with torch.no_grad():
            return self.run(unchanged, {})

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.reference[0]).all())

    def change(self, factors: Mapping[Names, float]) -> tuple[float, Rescaled]:
        """‖f − f₀‖ / ‖f₀‖ after each group is multiplied by its factor and the norms follow; and which norms did."""
        treat = Rescaled(list(factors.values()), self.reference[1], self.tolerance)
        tensors = {name: k * self.network.tensors[name] for names, k in factors.items() for name in names}
        f = self.reference[0].double()
        with torch.no_grad():
            moved = self.run(treat, tensors)[0].double()
        return float((moved - f).norm() / (f.norm() + 1e-300)), treat


def point_at(network: Network, x: ModelInput, path: Callable[[], str]) -> Point:
    return Point(network, network.placed(x), path)


def in_double(network: Network, few: ModelInput) -> Network:
    """The network in float64, or unchanged if its code requires its dtype."""
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in network.tensors.items()}
    double = replace(network, tensors=tensors)
    try:
        with torch.no_grad():
            double(double.placed(few), {})
    except ModelError:
        return network
    return double


def perturbed_point(point: Point) -> Point:
    """Perturb weights by 10 % of their size and inputs by half of their standard deviation.

    Only the weights are perturbed if the network fails on perturbed inputs.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = dict(point.network.tensors)
    for name in point.names:
        old = tensors[name]
        tensors[name] = old + 0.1 * (_rms(old) + 0.1) * noise(old, generator)
    for name, row in _padding_rows(point.network.model):
        alias = point.network.aliases.get(name, name)
        tensors[alias][row] = point.network.tensors[alias][row]
    network = replace(point.network, tensors=tensors)

    def perturbed(v: Any) -> Any:
        if not point.x.batched(v) or not v.is_floating_point():
            return v
        finite = v[torch.isfinite(v)]
        spread = float(finite.std()) if finite.numel() > 1 else 0.0
        return v + (0.5 * spread + 0.1) * noise(v, generator)

    for x in (point.x.mapped(perturbed, point.x.n), point.x):
        candidate = Point(network, x, point.path)
        try:
            if candidate.is_finite:
                return candidate
        except ModelError:  # some inputs have a restricted domain: fractions, masks, angles
            continue
    return point


def _padding_rows(model: nn.Module) -> list[tuple[str, int]]:
    """Padding rows of embeddings. Autograd gives them no gradient, so perturbing them would violate J_g θ_g = 0."""
    tables = ((path, m) for path, m in model.named_modules() if isinstance(m, nn.Embedding))
    return [(f"{path}.weight" if path else "weight", m.padding_idx) for path, m in tables if m.padding_idx is not None]


def noise(t: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)


def _rms(t: Tensor) -> float:
    return float(t.double().norm()) / max(t.numel(), 1) ** 0.5


def tracked_modules(model: nn.Module) -> Callable[[], str]:
    """A function that returns the path of the running module. Its hooks are on the borrowed copy: no removal needed."""
    stack: list[str] = []

    def leave(*_: Any) -> None:
        del stack[-1:]  # no error if the stack is empty: a user's hook may have raised before our pre-hook ran

    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(lambda *_, path=path: stack.append(path))
            module.register_forward_hook(leave, always_call=True)
    return lambda: stack[-1] if stack else ""
