"""How many iterations conjugate gradients take on the posterior precision of a trained CNN, by preconditioner.

python -m lapwing.bench.preconditioners
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

import lapwing as lw

PRECISIONS = (10.0, 1.0, 0.1)
RTOL = 1e-3  # of the error, in the norm of the precision
_N_TRAIN, _MOST = 500, 2000


class Iterations(TypedDict):
    preconditioner: str
    precision: float
    iterations: int | None  # None: more than the most that were tried


def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """666 parameters, trained on 500 of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images[:_N_TRAIN] / 16.0).float()[:, None]
    y = torch.from_numpy(digits.target[:_N_TRAIN]).long()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.double().eval(), x.double(), y


def measured() -> list[Iterations]:
    model, x, y = trained()
    full = lw.fit(model, (x, y), "classification", structure="full", progress=False)
    near = {
        "kron": lw.fit(model, (x, y), "classification", structure="kron", progress=False).curvature,
        "diag": lw.fit(model, (x, y), "classification", structure="diag", progress=False).curvature,
        "lowrank, 30": lw.fit(model, (x, y), "classification", structure=lw.LowRank(30), progress=False).curvature,
        "lowrank, 100": lw.fit(model, (x, y), "classification", structure=lw.LowRank(100), progress=False).curvature,
    }
    rows = []
    for precision in PRECISIONS:
        posterior = replace(full, prior=full.with_prior(precision).prior)
        P, P0 = posterior.precision.to_dense(), posterior.prior.P0
        truth = posterior.sample(1, torch.Generator().manual_seed(0))[0] - posterior.mean
        for name, H in near.items():
            rows.append(Iterations(preconditioner=name, precision=precision, iterations=_count(P, truth, H.plus(P0))))
        rows.append(Iterations(preconditioner="none", precision=precision, iterations=_count(P, truth, None)))
    return rows


def _count(P: Tensor, truth: Tensor, M: Any) -> int | None:
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in measured():
        print(json.dumps(row))
