"""The inputs of a convolution: overlapping patches at its output positions, formed explicitly only where necessary.

Uᵀ a is a convolution with the columns of U as kernels. In Σ_t a_t a_tᵀ, the block of kernel rows k and k' sums products
of image rows h + k and h + k' over the output rows h. So all blocks with the same k' − k are the same sum, except for a
few rows at the upper and lower edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.linalg import RowSum
from lapwing.network.jacobian import Images, Inputs
from lapwing.network.layers.base import joined, with_bias
from lapwing.operators import Arrangement

_CACHED_FLOATS = 1 << 20  # entries of patches formed at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class Window:
    """Geometry of a 2-d convolution without groups; `zeros` is the padding above, below, left and right."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    zeros: tuple[int, int, int, int]

    def spans(self) -> tuple[int, int]:
        """Rows and columns that the dilated kernel spans."""
        height, width = (d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))
        return height, width


@dataclass(frozen=True, eq=False)
class Patches(Inputs):
    """The patches of the inputs x (n · m, channels, …) of all calls.

    `form` computes the patches of an input explicitly, (n, r, q, i); without a `window` this is the only way.
    """

    arrangement: Arrangement
    calls: tuple[Tensor, ...]
    n: int
    form: Callable[[Tensor, int], Tensor]
    window: Window | None

    @property
    def attached(self) -> bool:
        return any(x.requires_grad for x in self.calls)

    def tensor(self) -> Tensor:
        return with_bias(self.arrangement, joined([self.form(x, self.n) for x in self.calls]))

    def columns(self) -> tuple[Tensor, bool]:
        alone = replace(self, arrangement=replace(self.arrangement, bias=None))
        return alone.tensor(), self.arrangement.bias is not None

    def at(self, data: slice) -> Patches:
        start, stop, _ = data.indices(self.n)
        images = [len(x) // self.n for x in self.calls]
        some = tuple(x[start * m : stop * m] for x, m in zip(self.calls, images, strict=True))
        return replace(self, calls=some, n=stop - start)

    def split(self, n: int, step: int) -> list[Inputs]:
        images = [x.split(step * (len(x) // n)) for x in self.calls]
        return [
            replace(self, calls=some, n=len(some[0]) * n // len(self.calls[0])) for some in zip(*images, strict=True)
        ]

    def kept(self) -> Inputs:
        return self._image() or super().kept()

    def without_bias(self) -> Inputs:
        image = self._image()
        alone = replace(self, arrangement=replace(self.arrangement, bias=None))
        return alone if image is None else image.without_bias()

    def in_fastest_order(self) -> Inputs:
        image = self._image()
        return self if image is None else image.in_fastest_order()

    def _image(self) -> Images | None:
        """The padded image, which is smaller than its patches; None unless there is one image per datum."""
        window, arrangement = self.window, self.arrangement
        if window is None or arrangement.weight is None or len(self.calls) > 1 or len(self.calls[0]) != self.n:
            return None
        x = _padded(self.calls[0], window).permute(0, 2, 3, 1).contiguous()
        return Images(x, window.kernel, window.stride, window.dilation, ones=arrangement.bias is not None)

    def add_gram_(self, total: RowSum) -> None:
        if self.window is not None and self.window.stride[0] == 1 and self.arrangement.weight is not None:
            for x in self.calls:
                total.add_product(self._bordered(x, self.window)[None])
            return
        for start in range(0, self.n, self._step):
            super(Patches, self.at(slice(start, start + self._step))).add_gram_(total)

    def rotated(self, U: Tensor) -> Tensor:
        window, arrangement = self.window, self.arrangement
        if window is None or arrangement.weight is None:
            return super().rotated(U)
        weight, bias = (U[0, :-1], U[0, -1]) if arrangement.bias is not None else (U[0], None)
        kernels = weight.T.reshape(U.shape[2], -1, *window.kernel)
        images = (F.conv2d(_padded(x, window), kernels, bias, window.stride, 0, window.dilation) for x in self.calls)
        return joined([s.flatten(2).mT.reshape(self.n, -1, 1, U.shape[2]) for s in images])

    @property
    def _step(self) -> int:
        """Number of data whose patches are formed at a time."""
        floats = sum(x.numel() for x in self.calls) // self.n * (prod(self.window.kernel) if self.window else 9)
        return max(1, _CACHED_FLOATS // max(1, floats))

    def _bordered(self, x: Tensor, window: Window) -> Tensor:
        """Σ a aᵀ of one call, bordered by the bias's row and column: Σ a, and the number of positions."""
        A, total, count = _patch_sums(x, window)
        if self.arrangement.bias is None:
            return A
        bottom = torch.cat([total, total.new_tensor([float(count)])])
        return torch.cat([torch.cat([A, total[:, None]], dim=1), bottom[None]])


def _padded(x: Tensor, window: Window) -> Tensor:
    above, below, left, right = window.zeros
    return F.pad(x, (left, right, above, below)) if any(window.zeros) else x


def _patch_sums(x: Tensor, window: Window) -> tuple[Tensor, Tensor, int]:
    """Σ a aᵀ (i, i), Σ a (i,) and the number of patches a, for a vertical stride of 1."""
    channels, (rows, columns) = x.shape[1], window.kernel
    n_rows = x.shape[2] + sum(window.zeros[:2]) - window.spans()[0] + 1
    width = x.shape[3] + sum(window.zeros[2:])
    n_columns = (width - window.spans()[1]) // window.stride[1] + 1
    k = columns * channels
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype  # half precision is too short
    A, total = x.new_zeros(rows, rows, k, k, dtype=dtype), x.new_zeros(rows, k, dtype=dtype)
    step = max(1, _CACHED_FLOATS // (x.shape[2] * n_columns * k))
    for images in x.to(dtype).split(step):
        strips = _strips(images, window)
        _add_row_products_(A, strips, window, n_rows)
        for row in range(rows):
            total[row] += _slice(strips, window, row * window.dilation[0], n_rows).sum(0)
    for row in range(rows):
        for other in range(row + 1, rows):
            A[other, row] = A[row, other].T
    # (row, row', column, channel, column', channel') → (channel, row, column) twice, the order of the weight
    shaped = A.view(rows, rows, columns, channels, columns, channels).permute(3, 0, 2, 5, 1, 4)
    i = rows * k
    return (
        shaped.reshape(i, i),
        total.view(rows, columns, channels).permute(2, 0, 1).flatten(),
        len(x) * n_rows * n_columns,
    )


def _strips(x: Tensor, window: Window) -> Tensor:
    """(n, c, height, width) → (height, n · n_columns, columns · c): patches one row high."""
    y = F.pad(x.permute(2, 0, 3, 1), (0, 0, *window.zeros[2:]))
    y = y.unfold(2, window.spans()[1], window.stride[1])[..., :: window.dilation[1]]
    return y.transpose(3, 4).reshape(len(y), -1, window.kernel[1] * x.shape[1]).contiguous()


def _slice(strips: Tensor, window: Window, start: int, n_rows: int) -> Tensor:
    """The strips of n_rows rows of the padded image from `start`, without its zero rows, flattened."""
    above = window.zeros[0]
    return strips[max(start - above, 0) : max(start + n_rows - above, 0)].flatten(0, 1)


def _add_row_products_(A: Tensor, strips: Tensor, window: Window, n_rows: int) -> None:
    """A[k, k'] += Σ_h strip(h + k)ᵀ strip(h + k') for k ≤ k', over the output rows h."""
    rows, (d, _) = window.kernel[0], window.dilation
    above, height = window.zeros[0], len(strips)

    def product(start: int, stop: int, shift: int) -> Tensor | float:
        start, stop = max(start, above), min(stop, above + height - shift)  # elsewhere one factor is zero padding
        if stop <= start:
            return 0.0
        upper, lower = (strips[start - above + s : stop - above + s].flatten(0, 1) for s in (0, shift))
        return upper.T @ lower

    for shift in range(rows):
        last = rows - 1 - shift
        if last * d >= n_rows:  # the row ranges of the blocks do not overlap: compute each on its own
            for row in range(last + 1):
                A[row, row + shift] += product(row * d, row * d + n_rows, shift * d)
            continue
        # Row r of the kernel sees image rows r d … r d + n_rows. `common` is the part that all r share; `upper` and
        # `lower` add the rows before and after it, row by row.
        common = product(last * d, n_rows, shift * d)
        upper: Tensor | float = common
        lower: Tensor | float = 0.0
        for row in reversed(range(last + 1)):
            A[row, row + shift] += upper
            upper = upper + product((row - 1) * d, row * d, shift * d) if row else upper
        for row in range(1, last + 1):
            lower = lower + product(n_rows + (row - 1) * d, n_rows + row * d, shift * d)
            A[row, row + shift] += lower
