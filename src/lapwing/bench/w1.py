"""W1: the full posterior of a 1-50-50-1 regression network on 1,000 points, in units of the network's own passes.

A gradient epoch is one forward and backward pass over the training data in batches of 128; a forward is one pass
over the 256 test inputs. Unit and work are timed in turn, in CPU seconds on one thread, and their median ratio counts.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn

import lapwing as lw

N_TRAIN, N_TEST, BATCH = 1000, 256, 128

Batches = list[tuple[Tensor, Tensor]]


def run(n_rounds: int = 15) -> dict[str, object]:
    """Measure fit, tuning and output covariance; a plain record."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"workload": "W1", "model": "MLP 1-50-50-1, tanh", "n_train": N_TRAIN, "rows": _rows(n_rounds)}
    finally:
        torch.set_num_threads(threads)


def _rows(n_rounds: int) -> list[dict[str, object]]:
    model, batches = trained_network()
    x = torch.linspace(-3, 3, N_TEST)[:, None]
    posterior = lw.fit(model, batches, "regression", structure="full", progress=False)
    tuned = lw.tune(posterior)

    def epoch() -> None:
        gradient_epoch(model, batches)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def fit() -> None:
        lw.fit(model, batches, "regression", structure="full", progress=False)

    cases: list[tuple[str, str, float, Callable[[], object], Callable[[], object], int]] = [
        ("full fit", "gradient epochs", 40, fit, epoch, 1),
        ("prior and noise tuned by the evidence", "gradient epochs", 5, lambda: lw.tune(posterior), epoch, 1),
        ("output covariance at 256 inputs", "forward passes", 300, lambda: tuned.outputs(x).cov, forward, 20),
    ]
    return [
        {"what": what, "ratio": round(ratio(work, unit, n_rounds, repeats), 2), "unit": name, "goal": goal}
        for what, name, goal, work, unit, repeats in cases
    ]


def ratio(work: Callable[[], object], unit: Callable[[], object], n_rounds: int, repeats: int) -> float:
    """Median over rounds of time(work) / time(unit); a short unit is repeated so that the clock can see it."""
    work(), unit()
    return median(_seconds(work) / (_seconds(unit, repeats) / repeats) for _ in range(n_rounds))


def _seconds(work: Callable[[], object], repeats: int = 1) -> float:
    start = process_time()
    for _ in range(repeats):
        work()
    return process_time() - start


def gradient_epoch(model: nn.Module, batches: Batches) -> None:
    for x, y in batches:
        model.zero_grad()
        ((model(x) - y) ** 2).sum().backward()


def trained_network() -> tuple[nn.Module, Batches]:
    """The network after 300 full-batch Adam steps on a noisy sine; the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
        X = torch.linspace(-2, 2, N_TRAIN)[:, None]
        Y = torch.sin(3 * X) + 0.1 * torch.randn(N_TRAIN, 1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        ((model(X) - Y) ** 2).mean().backward()
        optimiser.step()
    return model, list(zip(X.split(BATCH), Y.split(BATCH), strict=True))
