"""Held-out data as people have it, scored batch by batch; of several ranks, the data of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lapwing._types import Float, Tensor
from lapwing.data import Batches, Columns, ModelInput, is_array
from lapwing.errors import located
from lapwing.posterior import Posterior
from lapwing.runtime import distributed
from lapwing.runtime.progress import shown
from lapwing.runtime.sandbox import random_state_kept

ROWS = 256  # inputs scored at a time where they came as whole arrays


class Held(Sized, Protocol):
    def __iter__(self) -> Iterator[tuple[ModelInput, Any]]: ...


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """Inputs without targets, some rows at a time."""

    x: ModelInput

    def __len__(self) -> int:
        return (self.x.n + ROWS - 1) // ROWS

    def __iter__(self) -> Iterator[tuple[ModelInput, None]]:
        for start in range(0, self.x.n, ROWS):
            yield self.x.rows(slice(start, start + ROWS)), None


def labelled_or_not(posterior: Posterior, held_out: Any) -> Batches | Unlabelled:
    """Data as for `lw.fit`, whose targets nobody reads, or the inputs alone: a tensor, an array, a table, a mapping."""
    targets = (posterior.columns or Columns()).targets
    no_labels = isinstance(held_out, Mapping) and not any(name in held_out for name in targets)
    if no_labels or is_array(held_out):
        return Unlabelled(posterior.given(held_out))
    return posterior.batches(held_out, "held_out")


def scored(
    held_out: Held, score: Callable[[ModelInput, Any], Float[Tensor, "n ..."]], *, progress: bool | None
) -> Float[Tensor, "n ..."]:
    """The scores of all held-out data, in order."""
    pieces: list[Tensor] = []
    with random_state_kept():
        n_batches = len(held_out)
        for number, (x, y) in enumerate(shown(held_out, total=n_batches, what="held-out data", progress=progress)):
            with located(f"held_out, batch {number}"):
                pieces.append(score(x, y))
    found = [piece for each in distributed.gathered(pieces) for piece in each]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)
