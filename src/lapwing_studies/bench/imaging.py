"""What error bars of images cost, in training steps of the reconstruction. One case runs in one process:

python -m lapwing_studies.bench.imaging CT evidence
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import lapwing as lw
from lapwing.errors import InputError
from lapwing_studies.bench.case import Row, Timed, ratio
from lapwing_studies.bench.memory import peak_mib, resident_mib
from lapwing_studies.reproduce.phantoms import walnut_like

STEPS = "training steps"
MIB = 1536.0  # a posterior of 28 × 28 pixels and 820 measurements
LARGE_MIB = 4096.0  # 128 × 128 pixels


@dataclass(frozen=True)
class ImagingCase:
    workload: str
    what: str
    goal: float | None
    prepare: Callable[[], Timed]
    goal_mib: float | None
    rounds: float = 20.0  # seconds of measuring


def scanned(n: int, angles: int, steps: int, channels: int | None = None) -> lw.imaging.Reconstruction:
    """A slice with fine structure from so many angles, 5 % noise; a network that is briefly trained."""
    A, truth = lw.imaging.radon(n, angles), walnut_like(n)
    clean = A(truth)
    noise = torch.randn(clean.shape, dtype=clean.dtype, generator=torch.Generator().manual_seed(0))
    sigma = float(0.05 * clean.abs().mean())
    network = None if channels is None else lw.imaging.UNet(channels, 5)
    options: dict[str, Any] = {"noise_std": sigma, "steps": steps, "lr": 2e-3, "progress": False}
    return lw.imaging.reconstruct(A, clean + sigma * noise, network=network, **options)


def training_step(r: lw.imaging.Reconstruction) -> Callable[[], None]:
    """One step of Adam on the loss of a reconstruction, as anybody would write it."""
    network, y = deepcopy(r.network).train(), r.data.float()
    adam = torch.optim.Adam(network.parameters(), lr=1e-4)

    def step() -> None:
        adam.zero_grad()
        image = network(r.input)[0, 0]
        loss = (r.operator(image) - y).square().mean() + r.tv * lw.imaging.total_variation(image)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.step()

    return step


def _evidence() -> Timed:
    r = scanned(28, 20, 100)
    at = _some(lw.imaging.evidence(r, progress=False))
    return Timed(lambda: lw.imaging.evidence(r, progress=False)(at, 0.1), training_step(r))


def _again() -> Timed:
    r = scanned(28, 20, 100)
    curve = lw.imaging.evidence(r, progress=False)
    at = _some(curve)
    return Timed(lambda: curve(at, 0.1), training_step(r))


def _samples() -> Timed:
    r = scanned(28, 20, 100)
    post = lw.imaging.posterior(r, prior="one", progress=False)
    # A new value of the same covariance: nothing is factorised beforehand.
    return Timed(lambda: replace(post, way=replace(post.way)).sample(1000), training_step(r))  # type: ignore[type-var]


def _posterior() -> Timed:
    r = scanned(28, 20, 100)
    return Timed(lambda: lw.imaging.posterior(r, tv_prior=True, progress=False).std, training_step(r))


def _large() -> Timed:
    r = scanned(128, 40, 300, channels=8)
    effort = lw.imaging.Effort(n_samples=64, rtol=1e-2, rank=60)
    options: dict[str, Any] = {"mode": "network", "memory": "4GB", "effort": effort, "progress": False}
    return Timed(lambda: lw.imaging.posterior(r, **options).std, training_step(r))


def _some(curve: lw.imaging.ImageEvidence) -> dict[str, float]:
    return {name: 0.5 if name.endswith("length_scale") else 0.1 for name in curve.names}


CASES = {
    "evidence": ImagingCase("CT", "linearise, and the evidence", 300, _evidence, MIB),
    "evidence-again": ImagingCase("CT", "the evidence at other hyperparameters", 2, _again, MIB),
    "samples": ImagingCase("CT", "1,000 samples", 200, _samples, MIB),
    "posterior": ImagingCase("CT", "posterior, hyperparameters by the evidence and TV-PredCP", None, _posterior, MIB),
    "large": ImagingCase(
        "CT-128", "posterior and 64 samples, matrix-free, 8 channels", None, _large, LARGE_MIB, rounds=0.0
    ),
}


def measure(name: str) -> Row:
    """The memory of the first run, the ratio of those after it; a case that takes minutes runs once."""
    case = CASES[name]
    timed = case.prepare()
    timed.unit()
    before = resident_mib()
    start = time.process_time()
    peak = peak_mib(timed.work)
    seconds = time.process_time() - start
    found = seconds / _unit_seconds(timed) if case.rounds == 0 else ratio(timed, case.rounds)
    return Row(
        workload=case.workload,
        case=name,
        what=case.what,
        ratio=float(f"{found:.3g}"),
        unit=STEPS,
        goal=case.goal,
        peak_mib=round(peak - before, 1) if peak is not None and before is not None else None,
        goal_mib=case.goal_mib,
        note=f"{seconds:.3g} CPU seconds",
    )


def _unit_seconds(timed: Timed, repeats: int = 5) -> float:
    start = time.process_time()
    for _ in range(repeats):
        timed.unit()
    return (time.process_time() - start) / repeats


def run(workload: str, *, limit: float = 3600.0) -> Iterator[Row]:
    """Every case of a workload, in a process of its own."""
    names = [name for name, case in CASES.items() if case.workload.lower() == workload.lower()]
    if not names:
        raise InputError(f"Unknown workload {workload!r}; there are CT and CT-128.")
    for name in names:
        command = [sys.executable, "-m", "lapwing_studies.bench.imaging", CASES[name].workload, name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
        if done.returncode:
            raise InputError(f"{name} cannot run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        yield json.loads(done.stdout.splitlines()[-1])


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """Old rows, with those measured again replaced."""
    rows = {row["case"]: row for row in [*old, *new]}
    return [rows[name] for name in CASES if name in rows]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(sys.argv[2])))
