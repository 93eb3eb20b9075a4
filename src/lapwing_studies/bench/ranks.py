"""Cost of a fit on 1, 2 and 4 processes: CPU seconds per rank and bytes received, compared with a cost model.

    python -m lapwing_studies.bench.ranks

Each of W ranks does 1/W of the passes. An all-reduce transfers twice the tensor to each rank, less a W-th of it.
Eigenvectors of Kronecker factors are received once, from the ranks that computed them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import lapwing as lw

WIDTHS, N_DATA, BATCH = (64, 256, 256, 10), 4096, 128
STRUCTURES = ("diag", "kron", "ekfac")
WORLDS = (1, 2, 4)
_FLOAT = 8  # bytes


def main() -> None:
    print("| structure | ranks | CPU seconds of a rank | MB received | MB by the model |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for structure in STRUCTURES:
        for world in WORLDS:
            seconds, received = measured(structure, world)
            volumes = f"{received / 1e6:.2f} | {model(structure, world) / 1e6:.2f}"
            print(f"| {structure} | {world} | {seconds:.2f} | {volumes} |")
            sys.stdout.flush()


def measured(structure: str, world: int) -> tuple[float, int]:
    """The largest CPU seconds of any rank, and the bytes that rank 0 received."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_fit, (structure, world, folder), nprocs=world)
        said = [Path(folder, f"rank{r}").read_text().split() for r in range(world)]
    return max(float(seconds) for seconds, _ in said), int(said[0][1])


def model(structure: str, world: int) -> float:
    """Bytes that a rank receives in all-reduces and decompositions, without small messages."""
    p = sum((i + 1) * o for i, o in pairwise(WIDTHS))
    factors = sum((i + 1) ** 2 + o**2 for i, o in pairwise(WIDTHS))
    vectors = factors + sum(i + 1 + o for i, o in pairwise(WIDTHS))  # eigenvectors and eigenvalues
    sums = {"diag": p, "kron": factors, "ekfac": factors + p}[structure] + p  # and the gradient
    decomposed = 0 if structure == "diag" else vectors * (world - 1) / world
    return _FLOAT * (2 * (world - 1) / world * sums + decomposed)


def _fit(rank: int, structure: str, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    layers = [layer for i, o in pairwise(WIDTHS) for layer in (nn.Linear(i, o), nn.Tanh())]
    network = nn.Sequential(*layers[:-1])
    X, Y = torch.randn(N_DATA, WIDTHS[0]), torch.randint(WIDTHS[-1], (N_DATA,))
    own = slice(rank, None, world)
    batches = list(zip(X[own].split(BATCH), Y[own].split(BATCH), strict=True))
    lw.fit(network, [(x[:4], y[:4]) for x, y in batches[:1]], "classification", structure=structure)  # warms up
    received = counted()
    started = process_time()
    lw.fit(network, batches, "classification", structure=structure)
    Path(folder, f"rank{rank}").write_text(f"{process_time() - started} {received()}")
    dist.barrier()


def counted() -> Callable[[], int]:
    """From now on, count the bytes that this process receives in exchanges of tensors."""
    total, exchanges = [0], (dist.all_gather, dist.all_to_all_single, dist.broadcast)

    def all_gather(parts: list[Tensor], own: Tensor, **options: Any) -> Any:
        total[0] += (len(parts) - 1) * own.nbytes
        return exchanges[0](parts, own, **options)

    def all_to_all_single(received: Tensor, sent: Tensor, **options: Any) -> Any:
        total[0] += received.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        return exchanges[1](received, sent, **options)

    def broadcast(tensor: Tensor, source: int, **options: Any) -> Any:
        total[0] += tensor.nbytes * (dist.get_rank() != source)
        return exchanges[2](tensor, source, **options)

    for exchange in (all_gather, all_to_all_single, broadcast):
        setattr(dist, exchange.__name__, exchange)
    return lambda: total[0]


if __name__ == "__main__":
    main()
