"""The inputs a (n, r, q, i) of a layer, formed lazily: captured as they are, arranged when a contraction needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Int, Tensor
from lapwing.linalg import RowSum
from lapwing.network.jacobian.block import padded


class Inputs(ABC):
    """Inputs a (n, r, q, i) of n data at r positions to q parallel maps, with a column of ones for the bias.

    The patches of a convolution are much larger than its input, and few contractions need them explicitly.
    """

    by_channel: bool = True  # whether columns are in the weight's order (channel, row, column)

    @property
    def attached(self) -> bool:
        """Whether they are differentiable in the network's inputs."""
        return self.tensor().requires_grad

    @abstractmethod
    def tensor(self) -> Float[Tensor, "n r q i"]: ...

    def columns(self) -> tuple[Float[Tensor, "n r q _"], bool]:
        """The inputs without the column of ones if it can be omitted, and whether it was."""
        return self.tensor(), False

    @abstractmethod
    def at(self, data: slice) -> Inputs:
        """The inputs of a subset of the data."""

    def kept(self) -> Inputs:
        """The same in the form that takes the least memory, without references to other tensors."""
        return Given(self.tensor())

    def split(self, n: int, step: int) -> list[Inputs]:
        """The inputs of the n data in pieces of `step`."""
        return [self.at(slice(start, start + step)) for start in range(0, n, step)]

    def fresh(self) -> Inputs:
        """A copy without cached intermediate results."""
        return self

    def without_bias(self) -> Inputs:
        """All columns except the last one, which is the bias input."""
        return Given(self.tensor()[..., :-1])

    def in_fastest_order(self) -> Inputs:
        """The same columns in the order that is fastest to form; it depends on the layer only."""
        return self

    def order(self) -> Int[Tensor, " i"] | None:
        """Index of each of the weight's columns among these; None if they are in the weight's order."""
        return None

    def concatenated(self, others: Sequence[Inputs], r: int) -> Inputs:
        """These data followed by the others, each padded with zeros to r positions."""
        return Given(torch.cat([padded(inputs.tensor(), r, 1) for inputs in (self, *others)]))

    def add_gram_(self, total: RowSum) -> None:
        """total ← total + Σ a aᵀ over data and positions."""
        a, ones = self.columns()
        total.add(a.flatten(0, 1), ones=ones)

    def rotated(self, U: Float[Tensor, "q i j"]) -> Float[Tensor, "n r q j"]:
        """Uᵀ a at every position."""
        return torch.einsum("nrqi,qij->nrqj", self.tensor(), U)


@dataclass(frozen=True, eq=False)
class Given(Inputs):
    """Inputs stored explicitly."""

    values: Float[Tensor, "n r q i"]

    def tensor(self) -> Float[Tensor, "n r q i"]:
        return self.values

    def at(self, data: slice) -> Given:
        return Given(self.values[data])

    def split(self, n: int, step: int) -> list[Inputs]:
        return [Given(values) for values in self.values.split(step)]

    def kept(self) -> Given:
        return self


@dataclass(frozen=True, eq=False)
class Images(Inputs):
    """The patches of zero-padded images, and a column of ones for the bias if `ones`.

    A patch has `kernel` rows and columns at distance `dilation`; patches start at distance `stride`.
    """

    x: Float[Tensor, "n height width channels"]  # contiguous: channels last
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    ones: bool
    by_channel: bool = True  # columns in the weight's order (channel, row, column); else (row, column, channel)

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

    @property
    def attached(self) -> bool:
        return self.x.requires_grad

    def without_bias(self) -> Images:
        return replace(self, ones=False)

    def in_fastest_order(self) -> Images:
        return replace(self, by_channel=False)  # then each row of a patch is a contiguous copy

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
        """The patches as a strided view, axes in the order of the columns."""
        return self._view().permute(0, 1, 2, 5, 3, 4) if self.by_channel else self._view()

    def _view(self) -> Float[Tensor, "n down across rows columns channels"]:
        # as_strided: overlapping patches are a view of the image, without a copy.
        n, height, width, channels = self.x.shape
        spans = (d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        down, across = ((size - s) // t + 1 for size, s, t in zip((height, width), spans, self.stride, strict=True))
        datum, row, column, one = self.x.stride()
        shape = (n, down, across, *self.kernel, channels)
        strides = (datum, row * self.stride[0], column * self.stride[1], row * self.dilation[0])
        return self.x.as_strided(shape, (*strides, column * self.dilation[1], one), self.x.storage_offset())
