"""Iterations of conjugate gradients on the posterior precision of a trained CNN, by preconditioner.

The CNN is trained on images as they are, and on the same images with pixels in units that differ by up to a factor of
a thousand, for which the curvature varies most along the inputs of layers. A third CNN has tanh and average pooling
instead of ReLU and max pooling, is stopped early, and is evaluated with weaker priors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing_studies.reproduce.claims import Claim, every
from lapwing_studies.reproduce.means import grouped, where
from lapwing_studies.reproduce.study import Record, Study

DEFAULT = "Nystrom(64)"
RTOL = 1e-3  # relative error, in the norm of the precision
PRECONDITIONERS: dict[str, Any] = {
    "none": None,
    "Diag()": lw.Diag(),
    "Kron()": lw.Kron(),
    "Block()": lw.Block(),
    "Nystrom(30)": lw.Nystrom(30),
    "Nystrom(64)": lw.Nystrom(64),
    "LowRank(30)": lw.LowRank(30),
    "LowRank(100)": lw.LowRank(100),
}
_MOST = 1200


@dataclass(frozen=True)
class Size:
    n_train: int
    n_epochs: int


@dataclass(frozen=True)
class Training:
    """The kind of network, its inputs, and the priors."""

    activation: Callable[[], nn.Module]
    pooling: Callable[[int], nn.Module]
    precisions: tuple[float, ...]
    largest_unit: float = 0.0  # log₁₀
    early: bool = False  # twice the images, and a third of the epochs


TRAININGS = {
    "as they come": Training(nn.ReLU, nn.MaxPool2d, (10.0, 1.0, 0.1)),
    "in units a thousand apart": Training(nn.ReLU, nn.MaxPool2d, (10.0, 1.0, 0.1), largest_unit=1.5),
    "through tanh and averages": Training(nn.Tanh, nn.AvgPool2d, (1.0, 0.1, 0.01, 0.001), early=True),
}
SIZES = {"full": Size(500, 300), "quick": Size(200, 100), "toy": Size(20, 2)}


def run(study: Study) -> Record:
    size, p = SIZES[study.effort.name], sum(w.numel() for w in network(TRAININGS["as they come"]).parameters())
    jobs = [IterationsJob(inputs, study.effort.name) for inputs in TRAININGS]
    record = study.record("preconditioners", jobs, parameters=p, n_train=size.n_train, rtol=RTOL)
    record["rows"] = [row for rows in record.pop("runs") for row in rows]
    return record


@dataclass(frozen=True)
class IterationsJob:
    """Every preconditioner under every prior, for one training."""

    inputs: str
    effort: str

    @property
    def name(self) -> str:
        return f"preconditioners-{self.effort}-{self.inputs.replace(' ', '-')}"

    @property
    def made_with(self) -> str:
        return f"{SIZES[self.effort]} | {TRAININGS[self.inputs].precisions} | {', '.join(PRECONDITIONERS)} | {RTOL:g}"

    def run(self) -> list[Record]:
        return list(measured(self.inputs, SIZES[self.effort]))


def network(of: Training) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), of.activation(), of.pooling(2),
        nn.Conv2d(4, 8, 3, padding=1), of.activation(), of.pooling(2),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def trained(inputs: str, size: Size) -> tuple[nn.Module, Tensor, Tensor]:
    """A network trained on scikit-learn's digits; columns of pixels have units from 10^−s to 10^s."""
    from sklearn.datasets import load_digits

    digits, of = load_digits(), TRAININGS[inputs]
    n, n_epochs = (2 * size.n_train, size.n_epochs // 3) if of.early else (size.n_train, size.n_epochs)
    units = torch.logspace(-of.largest_unit, of.largest_unit, 8)
    x = units * torch.from_numpy(digits.images[:n] / 16.0).float()[:, None]
    y = torch.from_numpy(digits.target[:n]).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network(of)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(n_epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.double().eval(), x.double(), y


def measured(inputs: str, size: Size) -> Iterator[Record]:
    model, x, y = trained(inputs, size)

    def fitted(structure: Any) -> lw.Posterior:
        return lw.fit(model, (x, y), "classification", structure=structure, progress=False)

    full = fitted("full")
    near = {name: None if s is None else fitted(s).curvature for name, s in PRECONDITIONERS.items()}
    for precision in TRAININGS[inputs].precisions:
        posterior = replace(full, prior=full.with_prior(precision).prior)
        P, P0 = posterior.precision.to_dense(), posterior.prior.P0
        truth = posterior.sample(1, torch.Generator().manual_seed(0))[0] - posterior.mean
        for name, H in near.items():
            count = iterations(P, truth, None if H is None else H.plus(P0))
            yield Record(inputs=inputs, preconditioner=name, precision=precision, iterations=count)


def iterations(P: Tensor, truth: Tensor, M: Any) -> int | None:
    """Steps until the solution of P x = P x* is within RTOL of x*, in the norm of P."""

    def solve(r: Tensor) -> Tensor:
        return r if M is None else M.solve(r)

    x, r = torch.zeros_like(truth), P @ truth
    z = solve(r)
    p, rz, size = z.clone(), r @ z, truth @ r
    for k in range(1, _MOST):
        Pp = P @ p
        alpha = rz / (p @ Pp)
        x, r = x + alpha * p, r - alpha * Pp
        if (truth - x) @ (P @ (truth - x)) <= RTOL**2 * size:
            return k
        z = solve(r)
        rz, before = r @ z, rz
        p = z + rz / before * p
    return None


def found(record: Record, inputs: str) -> dict[float, dict[str, int | None]]:
    """Iterations by prior precision, the largest first, and preconditioner; None: more than the limit."""
    rows = sorted(where(record["rows"], inputs=inputs), key=lambda row: -row["precision"])
    by_prior = grouped(rows, "precision").items()
    return {prior: {row["preconditioner"]: row["iterations"] for row in some} for prior, some in by_prior}


def claims(record: Record) -> list[Claim]:
    settings = [counts for inputs in TRAININGS for counts in found(record, inputs).values()]

    def least(counts: dict[str, int | None], *names: str) -> int:
        return min(counts[name] or _MOST for name in names)

    return [
        every(f"{DEFAULT}, the default, takes fewer iterations than no preconditioner",
              [least(c, DEFAULT) < least(c, "none") for c in settings]),
        every("and no more than a diagonal, Kronecker factors or exact blocks of layers",
              [least(c, DEFAULT) <= least(c, "Diag()", "Kron()", "Block()") for c in settings]),
    ]  # fmt: skip
