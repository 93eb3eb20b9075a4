"""Screen all candidate groups with the gradients of one forward pass: J_g θ_g = 0 for a normalised group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing._types import Float
from lapwing.network.linearised import pull_back
from lapwing.priors.normalised.calls import NormCall, Treatment, with_batch_statistics
from lapwing.priors.normalised.point import Point, noise
from lapwing.priors.normalised.writers import Graph

_COTANGENTS = 3  # random vectors u: all products vanish by chance with probability zero, up to rounding


@dataclass(frozen=True, eq=False)
class EulerProducts:
    """uᵀ J_t θ_t for every tensor t and random vectors u, and the upper bounds ‖J_tᵀ u‖ ‖θ_t‖ (`sizes`).

    By EulerProducts's theorem, J_g θ_g = 0 if f is homogeneous of degree 0 in θ_g.
    """

    products: Mapping[str, Float[Tensor, " u"]]
    sizes: Mapping[str, Float[Tensor, " u"]]
    f_norm: float

    def vanishes(self, names: Sequence[str], tolerance: float) -> bool:
        """Whether the sum of a group's products is zero, relative to the sum of their upper bounds."""
        return bool((_total(self.products, names).abs() <= tolerance * _total(self.sizes, names)).all())

    def size(self, names: Sequence[str]) -> float:
        """‖J_gᵀ u‖ ‖θ_g‖ / ‖f‖: zero for a group without any effect."""
        return float(_total(self.sizes, names).max()) / (self.f_norm + 1e-300)

    def norm(self, names: Sequence[str]) -> float:
        """‖J_g θ_g‖ / ‖f‖, estimated with E (uᵀ J_g θ_g)² = ‖J_g θ_g‖² for u ~ N(0, I)."""
        return float(_total(self.products, names).square().mean().sqrt()) / (self.f_norm + 1e-300)


def _total(table: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.stack([table[name] for name in names]).sum(0)


@dataclass(frozen=True, eq=False)
class Screening:
    """Euler products, candidate groups that span layers (`joint`), and scales and shifts of the norms."""

    euler: EulerProducts
    joint: tuple[frozenset[str], ...]
    scales: frozenset[str]
    shifts: frozenset[str]


def _differentiated(point: Point, treat: Treatment) -> tuple[Tensor, list[NormCall], dict[str, Tensor]]:
    leaves = {name: point.network.tensors[name].detach().requires_grad_() for name in point.names}
    f, calls = point.run(treat, leaves)
    return f, calls, leaves


def euler_products(point: Point, treat: Treatment, inferred: Sequence[str]) -> EulerProducts:
    f, _, leaves = _differentiated(point, treat)
    return _products(f, {name: leaves[name] for name in inferred})


def _products(f: Tensor, leaves: Mapping[str, Tensor]) -> EulerProducts:
    generator = torch.Generator().manual_seed(1)
    products: dict[str, list[Tensor]] = {name: [] for name in leaves}
    sizes: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for _ in range(_COTANGENTS):
        for (name, leaf), g in zip(
            leaves.items(), pull_back(f, list(leaves.values()), noise(f, generator)), strict=True
        ):
            products[name].append((g.double() * leaf.detach().double()).sum())
            sizes[name].append(g.double().norm() * leaf.detach().double().norm())
    return EulerProducts(_stacked(products), _stacked(sizes), float(f.detach().double().norm()))


def _stacked(table: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack(values) for name, values in table.items()}


def screened(point: Point, inferred: Sequence[str]) -> Screening:
    """Gradients are taken of the inferred tensors alone: frozen ones, of an adapted network nearly all, only count as
    writers."""
    f, calls, leaves = _differentiated(point, with_batch_statistics)
    graph = Graph(leaves)
    joint = {writers for call in calls if (writers := graph.writers(call.input)) is not None}
    scales, shifts = _affine(point, calls, graph, f)
    euler = _products(f, {name: leaves[name] for name in inferred})
    return Screening(euler, tuple(sorted(joint, key=lambda w: (len(w), sorted(w)))), scales, shifts)


def _affine(point: Point, calls: Sequence[NormCall], graph: Graph, f: Tensor) -> tuple[frozenset[str], frozenset[str]]:
    """Scales and shifts of the norms. Those of hand-written norms are recognised by the only operation they enter."""
    scales = {graph.names[id(w)] for call in calls if id(w := call.affine[0]) in graph.names}
    shifts = {graph.names[id(b)] for call in calls if id(b := call.affine[1]) in graph.names}
    uses = graph.uses(f) if any(call.is_guard for call in calls) else {}
    for path in {call.path for call in calls if call.is_guard}:
        module = point.network.model.get_submodule(path)
        if any(True for _ in module.children()):  # a container: its own parameters are not those of a norm
            continue
        for key, p in module.named_parameters(recurse=False):
            name = point.network.aliases[f"{path}.{key}" if path else key]
            if p.ndim <= 1 and uses.get(name) == {"Mul"}:
                scales.add(name)
            elif p.ndim <= 1 and uses.get(name) == {"Add"}:
                shifts.add(name)
    return frozenset(scales), frozenset(shifts - scales)
