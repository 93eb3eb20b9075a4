"""Two moons: maps of a classifier's predictions over the plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.bench.networks import mlp, n_parameters, train_map
from lapwing_studies.bench.records import MoonsRecord, UncertaintyMap
from lapwing_studies.bench.sizes import Size

NOISE = 0.15
EXTENT = (-3.2, 4.2, -3.0, 3.5)
# A network is trained with each; the one with the highest evidence is shown.
PRECISIONS = (1.0, 0.3, 0.1)


def run(size: Size, *, seed: int, stage: Callable[[str], None]) -> MoonsRecord:
    """Train with several priors, keep the network with the highest evidence, and predict on a grid."""
    from sklearn.datasets import make_moons

    points, labels = make_moons(size.n_moons, noise=NOISE, random_state=seed)
    x, y = torch.as_tensor(points, dtype=torch.float32), torch.as_tensor(labels, dtype=torch.float32)
    stage("two moons: train")
    candidates = [_fit(x, y, precision, size, seed) for precision in PRECISIONS]
    stage("two moons: map the plane")
    precision, model, posterior = max(candidates, key=lambda c: float(c[2].log_evidence()))
    return MoonsRecord(
        parameters=n_parameters(model),
        precision=precision,
        candidates=list(PRECISIONS),
        extent=list(EXTENT),
        points=points.round(4).tolist(),
        labels=labels.tolist(),
        maps=_maps(posterior, model, size, torch.Generator().manual_seed(seed)),
    )


def _fit(x: Tensor, y: Tensor, precision: float, size: Size, seed: int) -> tuple[float, nn.Module, lw.Posterior]:
    model = mlp([2, 25, 25, 25, 1], seed=seed)
    train_map(model, x, y, _sum_nll, precision=precision, n_steps=size.n_steps)
    return precision, model, lw.fit(model, (x, y), "binary", structure="full", prior=precision)


def _sum_nll(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(f[:, 0], y, reduction="sum")


def _maps(posterior: lw.Posterior, model: nn.Module, size: Size, generator: torch.Generator) -> list[UncertaintyMap]:
    grid = _grid(size.n_map)
    glm: Any = posterior.predict(grid)
    sampled: Any = posterior.predict(grid, predictive="bnn", n_samples=size.n_samples, generator=generator)
    with torch.no_grad():
        map_probs = model(grid).sigmoid()
    named = [
        ("MAP", "probability", map_probs),
        ("sampled network", "probability", _class_one(sampled.probs)),
        ("GLM", "probability", _class_one(glm.probs)),
        ("sampled network", "epistemic", sampled.epistemic),
        ("GLM", "epistemic", glm.epistemic),
        ("GLM", "aleatoric", glm.aleatoric),
    ]
    return [UncertaintyMap(method=m, kind=k, values=_square(v, size.n_map)) for m, k, v in named]


def _class_one(probs: Tensor) -> Tensor:
    return probs.reshape(len(probs), -1)[:, -1]


def _grid(n: int) -> Tensor:
    """n × n points: y from low to high, with x the fast axis."""
    x, y = torch.linspace(EXTENT[0], EXTENT[1], n), torch.linspace(EXTENT[2], EXTENT[3], n)
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], -1)


def _square(values: Tensor, n: int) -> list[list[float]]:
    return [[round(v, 5) for v in row] for row in values.detach().double().reshape(n, n).tolist()]
