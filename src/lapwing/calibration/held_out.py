"""Held-out data in any form the library accepts, scored batch by batch over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lapwing._types import Float, Tensor
from lapwing.data import Batches, Columns, ModelInput, as_inputs, is_array
from lapwing.data.fixed_order import in_data_order
from lapwing.errors import InputError, located
from lapwing.posterior import Posterior
from lapwing.runtime import distributed
from lapwing.runtime.progress import shown
from lapwing.runtime.sandbox import random_state_kept

ROWS = 256  # batch size for inputs given as whole arrays


class HeldOutBatches(Sized, Protocol):
    """Batches of held-out data, with or without targets."""

    def __iter__(self) -> Iterator[tuple[ModelInput, Any]]: ...


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Inputs without targets, in batches."""

    x: ModelInput

    def __len__(self) -> int:
        return (self.x.n + ROWS - 1) // ROWS

    def __iter__(self) -> Iterator[tuple[ModelInput, None]]:
        for start in range(0, self.x.n, ROWS):
            yield self.x.rows(slice(start, start + ROWS)), None


def held_out_batches(posterior: Posterior, held_out: Any) -> Batches | Unlabelled:
    """Data as for `lw.fit`, whose targets are ignored, or inputs alone: a tensor, an array, a table, a mapping."""
    targets = (posterior.columns or Columns()).targets
    no_labels = isinstance(held_out, Mapping) and not any(name in held_out for name in targets)
    if no_labels or is_array(held_out):
        return Unlabelled(posterior.given(held_out))
    return posterior.batches(held_out, "held_out")


def inputs_alone(posterior: Posterior, x: Any) -> Iterator[ModelInput]:
    """Batches of inputs from one batch, a loader or a dataset; targets are dropped."""
    many = as_inputs(x, posterior.columns)
    batches = [x] if many is None else shown(in_data_order(many), total=len(many), what="alarm", progress=None)
    empty = True
    for batch in batches:
        empty = False
        yield from (piece for piece, _ in Unlabelled(posterior.given(batch)))
    if empty:
        raise InputError("alarm: the data gave no batch: the loader or data set is empty.")


def scored(
    held_out: HeldOutBatches, score: Callable[[ModelInput, Any], Float[Tensor, "n ..."]], *, progress: bool | None
) -> Float[Tensor, "n ..."]:
    """The scores of all held-out data, in order, gathered from all ranks."""
    pieces: list[Tensor] = []
    with random_state_kept():
        n_batches = len(held_out)
        for number, (x, y) in enumerate(shown(held_out, total=n_batches, what="held-out data", progress=progress)):
            with located(f"held_out, batch {number}"):
                pieces.append(score(x, y))
    found = [piece for each in distributed.gathered(pieces) for piece in each]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
