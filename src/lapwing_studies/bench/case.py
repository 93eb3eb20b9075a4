"""Benchmark cases: the work, the unit that it is measured in, and the goal. Each case runs in its own process:

    python -m lapwing_studies.bench.case W3 kron-fit
    python -m lapwing_studies.bench.case W2 kron-fit 8192  # with this many training data

Unit and work are timed alternately, in CPU seconds on one thread, and the median ratio is reported. The result is
therefore independent of the machine's speed, also if that varies. The first run of the work measures memory, not time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time
from typing import Any, TypedDict

import torch

import lapwing as lw
from lapwing.errors import InputError
from lapwing_studies.bench.memory import peak_mib, resident_mib
from lapwing_studies.bench.workloads import Workload, build

GE, FW, STEP = "gradient epochs", "forward passes", "plain steps"
N_POINTS = 1000  # points of the Gaussian process
PREDICTIVE_MIB = 512.0  # goal for the memory of a prediction of 256 inputs, above the model


class Row(TypedDict):
    """One measurement. `ratio` is None if the case could not run; `note` then says why."""

    workload: str
    case: str
    what: str
    ratio: float | None
    unit: str
    goal: float | None
    peak_mib: float | None
    goal_mib: float | None
    note: str


@dataclass(frozen=True)
class Timed:
    work: Callable[[], object]
    unit: Callable[[], object]
    unit_share: float = 1.0  # the unit counts as so many of what was run


@dataclass(frozen=True)
class Case:
    """`goals`: per workload that the case runs on; None means without a goal."""

    what: str
    unit: str
    goals: dict[str, float | None]
    prepare: Callable[[Workload], Timed]
    goal_mib: float | None = None


def measure(case_name: str, workload: Workload, *, seconds: float = 20.0) -> Row:
    """Time one case on a workload: three to nine rounds, for about `seconds` seconds."""
    case = CASES[case_name]
    workload.gradient_epoch()
    workload.forward()
    model_mib = resident_mib()
    timed = case.prepare(workload)
    peak = peak_mib(timed.work)
    return Row(
        workload=workload.name,
        case=case_name,
        what=case.what,
        ratio=float(f"{ratio(timed, seconds) / timed.unit_share:.3g}"),
        unit=case.unit,
        goal=case.goals.get(workload.name),
        peak_mib=round(peak - model_mib, 1) if peak is not None and model_mib is not None else None,
        goal_mib=case.goal_mib,
        note="",
    )


def ratio(timed: Timed, seconds: float) -> float:
    """Median over rounds of time(work) / time(unit); a short unit is repeated for the resolution of the clock."""
    start = process_time()
    repeats = max(1, round(0.05 / max(_seconds(timed.unit), 1e-6)))
    ratios: list[float] = []
    while len(ratios) < 3 or (len(ratios) < 9 and process_time() - start < seconds):
        ratios.append(_seconds(timed.work) / (_seconds(timed.unit, repeats) / repeats))
    return median(ratios)


def _seconds(work: Callable[[], object], repeats: int = 1) -> float:
    start = process_time()
    for _ in range(repeats):
        work()
    return process_time() - start


def _fit(**options: Any) -> Callable[[Workload], Timed]:
    return lambda w: Timed(lambda: _posterior(w, **options), w.gradient_epoch)


def _posterior(w: Workload, **options: Any) -> lw.Posterior:
    return lw.fit(w.model, w.batches, w.likelihood, progress=False, **options)


def _prepared(w: Workload, **options: Any) -> lw.Posterior:
    """A posterior with cached eigendecompositions: they depend on the data only, and are computed once per fit."""
    posterior = _posterior(w, **options)
    posterior.outputs(w.x[:1]).var  # noqa: B018
    return posterior


def _fit_and_decompose(w: Workload) -> Timed:
    return Timed(lambda: _prepared(w, structure="kron", params="last_layer"), w.gradient_epoch)


def _covariance(structure: str) -> Callable[[Workload], Timed]:
    def prepare(w: Workload) -> Timed:
        posterior = _prepared(w, structure=structure)
        return Timed(lambda: posterior.outputs(w.x).cov, w.forward)

    return prepare


def _gp_fit(w: Workload) -> Timed:
    """Fit with 1,000 points, and factorise their kernels; the unit is a gradient epoch over these points."""
    w = w.with_data(N_POINTS)
    return Timed(lambda: _prepared(w, structure=lw.GP(coupling="independent")), w.gradient_epoch)


def _gp_covariance(w: Workload) -> Timed:
    posterior = _prepared(w.with_data(N_POINTS), structure=lw.GP(coupling="independent"))
    return Timed(lambda: posterior.outputs(w.x).cov, w.forward)


def _input_gradients(w: Workload) -> Timed:
    """A prediction and the gradient of its entropy in the inputs; the unit is the prediction alone."""
    posterior, x = _prepared(w, structure="kron").with_prior(1.0), w.x.clone().requires_grad_()
    posterior.predict(w.x[:1])  # says now that it is not tuned

    def with_gradients() -> None:
        torch.autograd.grad(posterior.predict(x).entropy.sum(), x)

    return Timed(with_gradients, lambda: posterior.predict(w.x).entropy)


def _four_times_as_many(w: Workload) -> Timed:
    posterior, x = _prepared(w, structure="kron"), w.x.repeat(4, *(1 for _ in w.x.shape[1:]))
    return Timed(lambda: posterior.outputs(x).cov, lambda: posterior.outputs(w.x).cov, unit_share=4.0)


def _variances(w: Workload) -> Timed:
    posterior = _prepared(w, structure="kron", params="last_layer")
    return Timed(lambda: posterior.outputs(w.x).var, w.forward)


def _tune(structure: str, mode: str) -> Callable[[Workload], Timed]:
    """Tuning at the trained weights, as in other libraries; no mode search is included."""

    def prepare(w: Workload) -> Timed:
        posterior = _prepared(w, structure=structure)
        return Timed(lambda: lw.tune(posterior, mode=mode), w.gradient_epoch)

    return prepare


def _step(make: Callable[..., Any] | None, **options: Any) -> Callable[[Workload], Timed]:
    """A training step by an objective of lw.train on one batch, and a plain one of the same network with Adam."""

    def prepare(w: Workload) -> Timed:
        (x, y), model = w.batches[0], lw.train.smooth(w.model).train()
        plain, adam = deepcopy(model), torch.optim.Adam

        def plain_step(optimiser: torch.optim.Optimizer) -> None:
            optimiser.zero_grad()
            (w.loss(plain(x), y) / len(x)).backward()
            optimiser.step()

        unit = partial(plain_step, adam(plain.parameters()))
        if make is None:
            return Timed(unit, unit)
        objective = make(model, w.likelihood, n_data=60_000, **options)
        optimiser = adam(objective.param_groups(lr=1e-4))

        def step() -> None:
            optimiser.zero_grad()
            objective(x, y).backward()
            optimiser.step()

        return Timed(step, unit)

    return prepare


def _marglik_epoch(w: Workload) -> Timed:
    """An epoch with one update of 10 steps; the unit is a plain epoch with the fit that the update needs."""
    data, options = list(w.batches), dict[str, Any](epochs=1, lr=1e-4, progress=False)

    def with_evidence() -> None:
        lw.train.marglik(deepcopy(w.model), data, w.likelihood, steps=10, fisher="mc", **options)

    def plain_and_fits() -> None:
        """As many fits as the other makes: one for the update, one for the posterior at the end."""
        model = deepcopy(w.model)
        lw.train.map(model, data, w.likelihood, **options)
        for _ in range(2):
            lw.fit(model, data, w.likelihood, structure="kron", fisher="mc", progress=False)

    return Timed(with_evidence, plain_and_fits)


CASES: dict[str, Case] = {
    "full-fit": Case("full fit", GE, {"W1": 40}, _fit(structure="full")),
    "kron-fit": Case(
        "exact Kronecker fit", GE, {"W2": 6, "W3": 4.3, "W4": 8, "W5": 7.5, "W5-mha": None}, _fit(structure="kron")
    ),
    "kron-fit-mc": Case(
        "Kronecker fit, one sampled label",
        GE,
        {"W2": 2, "W3": 2, "W4": 3, "W5": 3},
        _fit(structure="kron", fisher="mc"),
    ),
    "diag-fit": Case("exact diagonal fit", GE, {"W2": 2.5, "W3": 6}, _fit(structure="diag")),
    "last-layer-fit": Case(
        "last-layer Kronecker fit",
        GE,
        {"W2": 0.5, "W3": 0.5, "W4": 0.5, "W5": 0.5},
        _fit(structure="kron", params="last_layer"),
    ),
    "last-layer-fit-eigen": Case(
        "last-layer Kronecker fit and eigendecompositions", GE, {"W6": 7.5}, _fit_and_decompose
    ),
    "full-covariance": Case(
        "output covariance at 256 inputs, full", FW, {"W1": 300}, _covariance("full"), PREDICTIVE_MIB
    ),
    "covariance": Case(
        "output covariance at 256 inputs",
        FW,
        {"W2": 22, "W3": 18, "W4": 40, "W5": 40, "W5-mha": None},
        _covariance("kron"),
        PREDICTIVE_MIB,
    ),
    "input-gradients": Case(
        "prediction at 256 inputs and its gradients in them", "prediction alone", {"W2": 4, "W3": 4}, _input_gradients
    ),
    "gp-fit": Case("GP of 1,000 points, independent outputs: fit and factors", GE, {"W2": 30, "W3": 30}, _gp_fit),
    "gp-covariance": Case(
        "output covariance at 256 inputs, GP of 1,000 points", FW, {"W2": None, "W3": 60}, _gp_covariance, 1024.0
    ),
    "cost-per-input": Case(
        "covariance, cost per input at 1,024 inputs",
        "that at 256",
        {"W2": 1.1, "W3": 1.1, "W4": 1.1, "W5": 1.1},
        _four_times_as_many,
    ),
    "variances": Case("output variances at 256 inputs, 1,000 classes", FW, {"W6": 5}, _variances, 200.0),
    "full-tune": Case("prior and noise tuned by the evidence, full", GE, {"W1": 5}, _tune("full", "network")),
    "tune": Case("prior tuned by the evidence", GE, {"W2": None, "W3": None}, _tune("kron", "network")),
    "vl-step": Case(
        "step of Variational Laplace",
        STEP,
        {"W2": 2.9, "W3": 2.9, "W4": 2.9, "W5": 2.9},
        _step(lw.train.VariationalLaplace, allow_piecewise=True),
    ),
    "mean-field-step": Case(
        "step of mean-field inference",
        STEP,
        {"W2": 1.25, "W3": 1.25, "W4": 1.25, "W5": 1.25},
        _step(lw.train.MeanField),
    ),
    "local-step": Case(
        "step of mean-field inference, local",
        STEP,
        {"W2": 2.2, "W3": 2.2, "W4": 2.2, "W5": 2.2},
        _step(lw.train.MeanField, estimator="local"),
    ),
    "plain-step": Case("plain training step: its memory", STEP, {"W2": None, "W3": None}, _step(None)),
    "marglik-epoch": Case(
        "epoch by the marginal likelihood", "plain epoch and its fits", {"W2": None, "W3": None}, _marglik_epoch
    ),
    "tune-linear": Case("linear mode found and prior tuned there", GE, {"W2": 18, "W3": 12.9}, _tune("kron", "linear")),
}


def listed(workload: str | None = None) -> list[tuple[str, str]]:
    """(workload, case) pairs, in the order of the workloads."""
    pairs = sorted((w, name) for name, case in CASES.items() for w in case.goals)
    chosen = [(w, name) for w, name in pairs if workload is None or w.lower() == workload.lower()]
    if not chosen:
        raise InputError(f"Unknown workload {workload!r}; there are {', '.join(dict.fromkeys(w for w, _ in pairs))}.")
    return chosen


def main(workload: str, case: str, n_data: str | None = None) -> None:
    torch.set_num_threads(1)
    w = build(workload)
    print(json.dumps(measure(case, w if n_data is None else w.with_data(int(n_data)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
