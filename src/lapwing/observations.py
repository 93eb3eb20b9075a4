"""Data as a likelihood sees it: inputs with checked, site-shaped targets."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lapwing.data import Batches, ModelInput
from lapwing.errors import ShapeError, located
from lapwing.likelihoods import Likelihood, Sites
from lapwing.progress import shown


def observed(
    data: Batches, likelihood: Likelihood, sites: Sites, *, progress: bool | None, what: str = "fit"
) -> Iterator[tuple[ModelInput, Tensor]]:
    """(x, encoded y) for every batch; errors name the batch."""
    for number, (x, y) in enumerate(shown(data, total=len(data), what=what, progress=progress)):
        with located(f"batch {number}"):
            pair = encode_batch(x, y, likelihood, sites)
        yield pair  # outside: errors of whoever works on it are not ours to label


def encode_batch(x: ModelInput, y: Any, likelihood: Likelihood, sites: Sites) -> tuple[ModelInput, Tensor]:
    x = _paired(x, y)
    return x, likelihood.encode(y, sites, x.n)


def _paired(x: ModelInput, y: Any) -> ModelInput:
    """x with as many data as there are targets: N is what was seen."""
    first = y[0] if isinstance(y, tuple) and y else y
    if not isinstance(first, Tensor) or first.ndim == 0 or first.shape[0] == x.n:
        return x
    n = first.shape[0]
    if any(isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == n for _, v in x.leaves()):
        return replace(x, n=n, shared=frozenset())
    raise ShapeError(f"{x.n} inputs came with {n} targets; they must pair up, row by row.")


def dropped_by_loader(data: Batches, seen: int) -> int:
    """How many data a DataLoader with drop_last left out of a whole data set."""
    loader = data.source
    if not isinstance(loader, DataLoader) or not loader.drop_last or len(data) == 0:
        return 0
    return max(0, len(loader.sampler) - seen) if isinstance(loader.sampler, Sized) else 0
