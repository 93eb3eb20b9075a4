"""Other libraries on the same workloads, in the same units: `make bench-peers`.

Runs in an environment of its own, and the package never imports it. Each case has a process of its own; a library that
fails is recorded as such, with its error. Notes say where a case is smaller, or easier, than the one Lapwing is given.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
FEW = 16  # inputs, where Jacobians of shape inputs × outputs × parameters are formed
LIMIT = 400.0
MEMORY = 16 << 30  # bytes a case may take: a library that forms its Jacobians fails, and the machine lives

GE, FW = "gradient epochs", "forward passes"


def workloads() -> Any:
    """The package's workloads, loaded as a file: they need torch alone."""
    path = HERE.parent / "src" / "lapwing" / "bench" / "workloads.py"
    spec = importlib.util.spec_from_file_location("workloads", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


class Loader:
    """What laplace-torch asks of a loader: batches, and a dataset of known length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.dataset = batches, range(sum(len(y) for _, y in batches))

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def frozen_norms(model: nn.Module) -> nn.Module:
    """Neither library has Kronecker factors for BatchNorm: its parameters are left out."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model


def laplace(w: Any, structure: str, backend: str, subset: str = "all") -> Any:
    import laplace.curvature as curvature
    from laplace import Laplace

    fitted = Laplace(
        frozen_norms(w.model), w.likelihood, subset, structure, prior_precision=1.0, backend=getattr(curvature, backend)
    )
    fitted.fit(Loader(w.batches), progress_bar=False)
    return fitted


def fit(structure: str, backend: str, subset: str = "all") -> Callable[[Any], Callable[[], object]]:
    return lambda w: lambda: laplace(w, structure, backend, subset)


def kfac(w: Any, kind: str) -> None:
    from curvlinops import FisherType, KFACLinearOperator

    params = [p for p in frozen_norms(w.model).parameters() if p.requires_grad]
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = KFACLinearOperator(
        *(w.model, loss, params, w.batches),
        check_deterministic=False,
        fisher_type=FisherType[kind],
        num_data=sum(len(y) for _, y in w.batches),
    )
    operator.compute_kronecker_factors()


def covariance(w: Any) -> Callable[[], object]:
    fitted, x = laplace(w, "kron", "CurvlinopsGGN"), w.x[:FEW]
    return lambda: fitted._glm_predictive_distribution(x)


def tune(w: Any) -> Callable[[], object]:
    fitted = laplace(w, "kron", "CurvlinopsGGN")
    return lambda: fitted.optimize_prior_precision(method="marglik", n_steps=100)


def last_layer_variances(w: Any) -> Callable[[], object]:
    fitted, x = laplace(w, "kron", "CurvlinopsGGN", "last_layer"), w.x[:FEW]
    return lambda: fitted._glm_predictive_distribution(x)


def fewer(w: Any, n_batches: int) -> Any:
    return workloads_module.Workload(w.name, w.described, w.model, w.batches[:n_batches], w.x, w.likelihood, w.loss)


EIGH = "its eigendecompositions included"
NO_NORMS = "without the BatchNorm parameters"
SMALL = f"{FEW} inputs, counted as that share of a forward pass over 256"

# (library, case, unit, workloads, prepare: workload → work, note)
CASES: list[tuple[str, str, str, list[str], Callable[[Any], Callable[[], object]], str]] = [
    ("laplace-torch", "full-fit", GE, ["W1"], fit("full", "CurvlinopsGGN"), ""),
    ("curvlinops", "kron-fit", GE, ["W2", "W3", "W4", "W5"], lambda w: lambda: kfac(w, "TYPE2"), ""),
    (
        "laplace-torch",
        "kron-fit",
        GE,
        ["W2", "W3", "W4", "W5"],
        fit("kron", "CurvlinopsGGN"),
        EIGH,
    ),
    ("curvlinops", "kron-fit-mc", GE, ["W2", "W3", "W4", "W5"], lambda w: lambda: kfac(w, "MC"), ""),
    (
        "laplace-torch with BackPACK",
        "diag-fit",
        GE,
        ["W2", "W3"],
        fit("diag", "BackPackGGN"),
        "",
    ),
    ("laplace-torch", "diag-fit", GE, ["W2", "W3"], fit("diag", "CurvlinopsGGN"), ""),
    (
        "laplace-torch",
        "last-layer-fit-eigen",
        GE,
        ["W6"],
        fit("kron", "CurvlinopsGGN", "last_layer"),
        "128 data, and their own gradient epoch",
    ),
    ("laplace-torch", "covariance", FW, ["W2", "W3", "W4", "W5"], covariance, SMALL),
    ("laplace-torch", "variances", FW, ["W6"], last_layer_variances, SMALL),
    ("laplace-torch", "tune", GE, ["W2", "W3"], tune, "100 steps of Adam"),
]


def measure(number: int, name: str) -> dict[str, Any]:
    library, case, unit, _, prepare, note = CASES[number]
    w = workloads_module.build(name)
    if name == "W6":
        w = fewer(w, 1)
    note = "; ".join(part for part in (note, NO_NORMS if name == "W4" else "") if part)
    work = prepare(w)
    share = FEW / len(w.x) if unit == FW else 1.0
    value = ratio(work, w.forward if unit == FW else w.gradient_epoch) / share
    return row(library, case, unit, name, float(f"{value:.3g}"), note)


def row(library: str, case: str, unit: str, name: str, value: float | None, note: str) -> dict[str, Any]:
    return {"library": library, "workload": name, "case": case, "ratio": value, "unit": unit, "note": note}


def ratio(work: Callable[[], object], unit: Callable[[], object], budget: float = 20.0) -> float:
    """As the package's own: unit and work in turn, CPU seconds, the median ratio; less often where it is slow."""
    first = seconds(work)
    repeats = max(1, round(0.05 / max(seconds(unit), 1e-6)))
    n_rounds = max(1, min(9, round(budget / max(first, 1e-6))))
    return median(seconds(work) / (seconds(unit, repeats) / repeats) for _ in range(n_rounds))


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    start = process_time()
    for _ in range(repeats):
        work()
    return process_time() - start


def one(number: int, name: str) -> dict[str, Any]:
    """A case in a process of its own; its error, in short, when it fails."""
    library, case, unit, *_ = CASES[number]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(number), name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return row(library, case, unit, name, None, f"stopped after {LIMIT:g} s")
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return row(library, case, unit, name, None, error[:160].replace("|", "/"))
    return json.loads(done.stdout.splitlines()[-1])


def main(out: Path) -> None:
    rows = []
    for number, (library, case, _, names, _, _) in enumerate(CASES):
        for name in names:
            rows.append(one(number, name))
            print(f"{name:<7}{library}, {case}: {rows[-1]['ratio']} {rows[-1]['note']}", flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({"rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 3:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        workloads_module = workloads()
        print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))
    else:
        main(HERE.parent / "bench-results" / "peers.json")
