"""The training data of a refinement, with a count of the passes over them."""

from __future__ import annotations

from collections.abc import Iterator

from lapwing._types import Tensor
from lapwing.data import ModelInput
from lapwing.network.products import Source


class CountedPasses:
    """A source of (x, encoded y) that counts complete passes."""

    def __init__(self, source: Source) -> None:
        self.source, self.n = source, 0

    def __call__(self) -> Iterator[tuple[ModelInput, Tensor]]:
        yield from self.source()
        self.n += 1
