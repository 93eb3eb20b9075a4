"""Small posteriors of every kind, and whether two of them are the same: shared by tests of files, merging, resuming."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw

N = 40
G = torch.Generator().manual_seed(3)
X = torch.randn(N, 3, generator=G, dtype=torch.float64)
T = torch.randn(5, 3, generator=G, dtype=torch.float64)
REAL = torch.stack([X.sum(1).sin(), X[:, 0] - X[:, 1] ** 2], 1) + 0.1 * torch.randn(N, 2, generator=G).double()
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def network(n_outputs: int, width: int = 4) -> nn.Module:
    """With a normalisation layer, so that kron has blocks without a rule, and buffers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(n_outputs)
        layers = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, n_outputs)
        return nn.Sequential(*layers).double().eval()


STRUCTURES: dict[str, Any] = {
    "full": "full",
    "block": "block",
    "kron": "kron",
    "kron split": lw.Kron(damping="split"),
    "kron separate": lw.Kron(bias="separate", sharing="reduce"),
    "ekfac": "ekfac",
    "diag": "diag",
    "lowrank": lw.LowRank(rank=5),
    "nystrom": lw.Nystrom(rank=5),
}


@dataclass(frozen=True)
class Kind:
    """A likelihood with targets of its own."""

    likelihood: Callable[[], Any]
    targets: Tensor
    n_outputs: int


KINDS = {
    "regression": Kind(lambda: "regression", REAL, 2),
    "per output": Kind(lambda: lw.Gaussian(per_output=True), REAL, 2),
    "known noise": Kind(lambda: lw.Gaussian(0.3), REAL, 2),
    "classes": Kind(lambda: lw.Categorical(weight=(1.0, 2.0, 0.5)), LABELS, 3),
    "labels": Kind(lambda: "multilabel", (REAL > 0).double(), 2),
    "counts": Kind(lambda: lw.Poisson(exposure=2.0), (REAL.abs() * 3).floor(), 2),
    "noise too": Kind(lambda: lw.HeteroscedasticGaussian(link="softplus"), REAL[:, :1], 2),
}


def fitted(kind: str = "classes", structure: Any = "kron", rows: slice = slice(None), **options: Any) -> lw.Posterior:
    what = KINDS[kind]
    data = X[rows], what.targets[rows]
    return lw.fit(network(what.n_outputs), data, what.likelihood(), structure=structure, **options)


@cache
def kept(kind: str = "classes", structure: Any = "kron") -> lw.Posterior:
    """The same, fitted once: a posterior is frozen."""
    return fitted(kind, structure)


DRAWN = {"samples", "functions", "sampled networks"}


def answers(posterior: lw.Posterior, but: Collection[str] = ()) -> dict[str, Tensor]:
    """What every verb says."""
    verbs: dict[str, Callable[[], Any]] = {
        "mean": lambda: posterior.mean,
        "output mean": lambda: posterior.outputs(T).mean,
        "output var": lambda: posterior.outputs(T).var,
        "output cov": lambda: posterior.outputs(T).cov,
        "joint": lambda: posterior.joint_outputs(T).cov,
        "prediction": lambda: _centre(posterior.predict(T, n_samples=16)),
        "sampled networks": lambda: _centre(posterior.predict(T, predictive="bnn", n_samples=8)),
        "samples": lambda: posterior.sample(3),
        "functions": lambda: posterior.functions(2)(T),
        "marginal variance": posterior.marginal_variance,
        "covariance": posterior.covariance,
        "evidence": posterior.log_evidence,
        "effective dimension": posterior.effective_dimension,
        "log lik": posterior.log_lik,
        "gradient": posterior.data_gradient,
        "another prior": lambda: posterior.with_prior(3.0).log_evidence(),
        "n": lambda: torch.tensor(posterior.n_data),
    }
    return {name: verb().detach() for name, verb in verbs.items() if name not in but}


def _centre(prediction: Any) -> Tensor:
    return prediction.probs if hasattr(prediction, "probs") else prediction.mean


def assert_same_bits(a: lw.Posterior, b: lw.Posterior) -> None:
    ours, theirs = answers(a), answers(b)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"not the same bits: {different}"


def assert_close(a: lw.Posterior, b: lw.Posterior, rtol: float = 1e-9, but: Collection[str] = DRAWN) -> None:
    """Each answer up to rtol of its own size. Draws depend on which root of the precision is at hand."""
    ours, theirs = answers(a, but), answers(b, but)
    for name, value in ours.items():
        error = (value.double() - theirs[name].double()).abs().max()
        assert float(error) <= rtol * float(value.abs().max() + 1e-300), f"{name}: off by {float(error):.2g}"
