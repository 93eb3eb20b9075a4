"""Run as a script in a process of its own: the measured peak memory of a fit and of a prediction, and the planned one.

`python peaks.py W3 kron` prints JSON. Tensors are given back to the system as soon as they are freed (the caller sets
MALLOC_MMAP_THRESHOLD_), so that what is measured is what is in use, and not what the allocator keeps for later.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from torch import nn

import lapwing as lw
from lapwing_studies.bench import workloads

N_INPUTS = 256


def main(workload: str, structure: str) -> None:
    torch.set_num_threads(1)
    built = workloads.build(workload)
    x, y = built.batches[0]
    _warm_up(structure)
    built.loss(built.model(x[:8]), y[:8]).backward()
    built.model.zero_grad(set_to_none=True)
    planned = lw.plan(built.model, built.batches, built.likelihood, n_inputs=N_INPUTS)
    row = next(row for row in planned.rows if row.structure == structure)
    before = _settled()
    posterior = lw.fit(built.model, built.batches, built.likelihood, structure=structure)
    fit = _status("VmHWM") - before
    _settled()
    assert posterior.outputs(built.x[:N_INPUTS]).cov.shape[0] == N_INPUTS
    predict = _status("VmHWM") - before
    measured = {"fit": fit, "predict": predict}
    print(json.dumps({"measured": measured, "planned": {"fit": row.fit_bytes, "predict": row.predict_bytes}}))


def _warm_up(structure: str) -> None:
    """Code and libraries are loaded when first used; a small network uses what the large one will."""
    body = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 200))
    model = nn.Sequential(*body, nn.Tanh(), nn.Linear(200, 3)).eval()
    data = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3)]
    lw.plan(model, data, "classification")
    assert lw.fit(model, data, "classification", structure=structure).outputs(data[0][0]).cov.isfinite().all()


def _settled() -> int:
    """Bytes held now; the system's own high-water mark is set back to them."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    main(*sys.argv[1:])
