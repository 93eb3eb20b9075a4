"""A layer's inputs as a value: what they are is settled when they are captured, how they are laid out when needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg import GramSum


class Inputs(ABC):
    """a (n, r, q, i): of n data, at r positions each, to q parallel maps; a column of ones for the bias included.

    A convolution's patches are much larger than its input, and few contractions need them as such.
    """

    @abstractmethod
    def tensor(self) -> Float[Tensor, "n r q i"]: ...

    @abstractmethod
    def at(self, data: slice) -> Inputs:
        """Those of some of the data."""

    def add_gram_(self, total: GramSum) -> None:
        """total ← total + Σ a aᵀ over data and positions."""
        total.add(self.tensor().flatten(0, 1))

    def rotated(self, U: Float[Tensor, "q i j"]) -> Float[Tensor, "n r q j"]:
        """Uᵀ a."""
        return torch.einsum("nrqi,qij->nrqj", self.tensor(), U)


@dataclass(frozen=True, eq=False)
class Given(Inputs):
    """Inputs that are there already."""

    values: Float[Tensor, "n r q i"]

    def tensor(self) -> Float[Tensor, "n r q i"]:
        return self.values

    def at(self, data: slice) -> Given:
        return Given(self.values[data])
