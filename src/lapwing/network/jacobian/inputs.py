"""A layer's inputs as a value: what they are is settled when they are captured, how they are laid out when needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.linalg import GramSum
from lapwing.network.jacobian.block import padded


class Inputs(ABC):
    """a (n, r, q, i): of n data, at r positions each, to q parallel maps; a column of ones for the bias included.

    A convolution's patches are much larger than its input, and few contractions need them as such.
    """

    by_channel: bool = True  # whether columns come in the weight's order

    @abstractmethod
    def tensor(self) -> Float[Tensor, "n r q i"]: ...

    def columns(self) -> tuple[Float[Tensor, "n r q _"], bool]:
        """The same without the ones, if they need not be written down, and whether they were left out."""
        return self.tensor(), False

    @abstractmethod
    def at(self, data: slice) -> Inputs:
        """Those of some of the data."""

    def kept(self) -> Inputs:
        """The same in the form that takes least memory, and holds on to nothing else."""
        return Given(self.tensor())

    def without_bias(self) -> Inputs:
        """All columns but the last, which are ones."""
        return Given(self.tensor()[..., :-1])

    def in_any_order(self) -> Inputs:
        """The same columns in the order in which they are formed most quickly: one order for all data of a layer."""
        return self

    def order(self) -> Int[Tensor, " i"] | None:
        """Where the weight's columns stand among these; None: they are in order."""
        return None

    def concatenated(self, others: Sequence[Inputs], r: int) -> Inputs:
        """These data followed by the others'; r positions each, behind their own such as contribute nothing."""
        return Given(torch.cat([padded(inputs.tensor(), r, 1) for inputs in (self, *others)]))

    def add_gram_(self, total: GramSum) -> None:
        """total ← total + Σ a aᵀ over data and positions."""
        a, ones = self.columns()
        total.add(a.flatten(0, 1), ones=ones)

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

    def kept(self) -> Given:
        return self


@dataclass(frozen=True, eq=False)
class Images(Inputs):
    """The patches of images that have their zeros around them; a column of ones for the bias where `ones`.

    A patch is `kernel` rows and columns, `dilation` apart, and the next one starts `stride` further.
    """

    x: Float[Tensor, "n height width channels"]  # neighbours in memory are channels
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    ones: bool
    by_channel: bool = True  # columns in the weight's order, channel, row, column; else row, column, channel

    def tensor(self) -> Float[Tensor, "n r q i"]:
        a, ones = self.columns()
        return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1) if ones else a

    def columns(self) -> tuple[Float[Tensor, "n r q _"], bool]:
        patches = self._patches()
        return patches.reshape(len(self.x), -1, 1, patches.shape[3:].numel()), self.ones

    def at(self, data: slice) -> Images:
        return replace(self, x=self.x[data])

    def kept(self) -> Images:
        return self

    def without_bias(self) -> Images:
        return replace(self, ones=False)

    def in_any_order(self) -> Images:
        return replace(self, by_channel=False)  # rows of a patch are copied as they stand

    def order(self) -> Int[Tensor, " i"] | None:
        if self.by_channel:
            return None
        shape = (*self.kernel, self.x.shape[-1])
        numbers = torch.arange(shape[0] * shape[1] * shape[2], device=self.x.device)
        return numbers.view(shape).permute(2, 0, 1).flatten()

    def concatenated(self, others: Sequence[Inputs], r: int) -> Inputs:
        same = [other for other in others if isinstance(other, Images) and other.x.shape[1:] == self.x.shape[1:]]
        if len(same) < len(others):
            return super().concatenated(others, r)
        return replace(self, x=torch.cat([self.x, *(other.x for other in same)]))

    def _patches(self) -> Float[Tensor, "n down across _ _ _"]:
        """In the order of the columns."""
        return self._view().permute(0, 1, 2, 5, 3, 4) if self.by_channel else self._view()

    def _view(self) -> Float[Tensor, "n down across rows columns channels"]:
        n, height, width, channels = self.x.shape
        spans = (d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        down, across = ((size - s) // t + 1 for size, s, t in zip((height, width), spans, self.stride, strict=True))
        datum, row, column, one = self.x.stride()
        shape = (n, down, across, *self.kernel, channels)
        strides = (datum, row * self.stride[0], column * self.stride[1], row * self.dilation[0])
        return self.x.as_strided(shape, (*strides, column * self.dilation[1], one), self.x.storage_offset())
