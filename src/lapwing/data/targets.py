"""Batches with encoded targets: validated and arranged by site, as the likelihood needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lapwing.data import Batches, ModelInput
from lapwing.errors import ShapeError, located
from lapwing.likelihoods import Categorical, Likelihood, Sites
from lapwing.runtime import distributed
from lapwing.runtime.progress import shown
from lapwing.runtime.sandbox import random_state_kept


def encoded_batches(
    data: Batches, likelihood: Likelihood, sites: Sites, *, progress: bool | None, what: str = "fit"
) -> Iterator[tuple[ModelInput, Tensor]]:
    """Yield (x, encoded y) for every batch, with a progress bar. Errors name the batch."""
    for number, (x, y) in enumerate(shown(data, total=len(data), what=what, progress=progress)):
        with located(f"batch {number}"):
            pair = encode_batch(x, y, likelihood, sites)
        yield pair  # outside of `located`: errors raised by the caller's loop body must not get the prefix


def encode_batch(x: ModelInput, y: Any, likelihood: Likelihood, sites: Sites) -> tuple[ModelInput, Tensor]:
    x = _paired(x, y)
    if ragged(likelihood, sites) and isinstance(y, Tensor) and y.ndim == 2:
        x = replace(x, positions=y.shape[1])
    return x, likelihood.encode(padded_labels(y, likelihood, sites), sites, x.n)


def ragged(likelihood: Likelihood, sites: Sites) -> bool:
    """Whether sequences may differ in length between batches: one label per position, with an `ignore_index`."""
    return isinstance(likelihood, Categorical) and len(sites.site_shape) == 1 and len(sites.datum_shape) == 2


def padded_labels(y: Any, likelihood: Likelihood, sites: Sites) -> Any:
    """Pad the labels of shorter sequences with `ignore_index` to the length `sites.t`."""
    if not isinstance(likelihood, Categorical) or not ragged(likelihood, sites) or not isinstance(y, Tensor):
        return y
    if y.ndim != 2 or y.shape[1] >= sites.t or y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        return y
    return torch.nn.functional.pad(y.long(), [0, sites.t - y.shape[1]], value=likelihood.ignore_index)


def longest_labels(data: Batches, sites: Sites) -> int:
    """The largest number of labels per datum; one pass over the data without the model, unless all shapes are equal."""
    longest = sites.t
    if not data.alike:
        with random_state_kept():
            longest = max([longest, *(y.shape[1] for _, y in data if isinstance(y, Tensor) and y.ndim == 2)])
    return max(distributed.gathered(longest))


def _paired(x: ModelInput, y: Any) -> ModelInput:
    """x with its batch size set to the number of targets, if another argument than the first is batched."""
    first = y[0] if isinstance(y, tuple) and y else y
    if not isinstance(first, Tensor) or first.ndim == 0 or first.shape[0] == x.n:
        return x
    # `as_input` took n from the first argument. It may be an unbatched table; the targets know the batch size.
    n = first.shape[0]
    if any(isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == n for _, v in x.leaves()):
        return replace(x, n=n, shared=frozenset())
    raise ShapeError(f"{x.n} inputs came with {n} targets; they must pair up, row by row.")


def dropped_by_loader(data: Batches, seen: int) -> int:
    """Number of data that a DataLoader with drop_last=True left out."""
    loader = data.source
    if not isinstance(loader, DataLoader) or not loader.drop_last or len(data) == 0:
        return 0
    return max(0, len(loader.sampler) - seen) if isinstance(loader.sampler, Sized) else 0
