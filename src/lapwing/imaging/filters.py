"""Two more measurements: a blurred photograph, and some frequencies of an image, as in magnetic resonance imaging."""

from __future__ import annotations

from math import ceil
from typing import Any, Literal

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError, ShapeError
from lapwing.imaging.maps import FourierMap, SeparableMap
from lapwing.imaging.operator import Operator, shape_of
from lapwing.runtime.arguments import positive

_REACH = 4  # standard deviations at which the kernel is cut off


def blur(n: int | tuple[int, int], std: float, *, edges: Literal["zero", "reflect"] = "zero") -> Operator:
    """A Gaussian blur of n × n images, of `std` pixels: data of the images' own shape.

    Beyond its edges the image is zero, or its own reflection. The kernel is cut off at four standard deviations.
    """
    sizes = shape_of("n", n)
    if len(sizes) != 2:
        raise ShapeError(f"blur: expected the size of square images or (height, width), got {n!r}.")
    if edges not in ("zero", "reflect"):
        raise InputError(f'blur: edges must be "zero" or "reflect", got {edges!r}.')
    width = positive("std", std)
    rows, columns = (_along(size, width, edges) for size in sizes)
    return Operator(SeparableMap(rows, columns), sizes, data_shape=sizes, name=f"blur, std {width:g}")


def fourier(n: int | tuple[int, int], mask: Any) -> Operator:
    """The frequencies of an image where the mask is true: data (2, frequencies), real parts and imaginary parts.

    `mask`: (n, n) in the order of torch.fft.fft2, zero frequency first; or (n,), whole columns of it. The transform is
    orthonormal. Complex data y: torch.stack([y.real, y.imag]).
    """
    sizes = shape_of("n", n)
    if len(sizes) != 2:
        raise ShapeError(f"fourier: expected the size of square images or (height, width), got {n!r}.")
    try:
        seen = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputTypeError(f"fourier: expected the mask as a tensor or array, got {type(mask).__name__}.") from error
    if seen.shape == sizes[1:]:
        seen = seen.expand(sizes)
    if tuple(seen.shape) != sizes:
        raise ShapeError(f"fourier: expected a mask of {sizes}, or {sizes[1:]} for columns, got {tuple(seen.shape)}.")
    if not bool(((seen == 0) | (seen == 1)).all()):
        raise InputError("fourier: expected a mask of true and false, or ones and zeros.")
    seen = seen.bool().clone()
    if not bool(seen.any()):
        raise InputError("fourier: the mask keeps no frequency, so there would be no data.")
    count = int(seen.sum())
    return Operator(
        FourierMap(seen), sizes, data_shape=(2, count), name=f"fourier, {count} of {seen.numel()} frequencies"
    )


def _along(n: int, std: float, edges: str) -> Float[Tensor, "n n"]:
    """The blur along one axis: each row the kernel around its pixel, with what lies beyond the edges folded back."""
    reach = ceil(_REACH * std)
    offsets = torch.arange(-reach, reach + 1)
    kernel = torch.exp(-0.5 * (offsets.double() / std) ** 2)
    kernel = kernel / kernel.sum()
    K = torch.zeros(n, n, dtype=torch.float64)
    for at in range(n):
        places = at + offsets
        if edges == "reflect":  # … 1 0 | 0 1 2 … n−1 | n−1 …: period 2 n
            places = places % (2 * n)
            places = torch.where(places < n, places, 2 * n - 1 - places)
        inside = (places >= 0) & (places < n)
        K[at].index_add_(0, places[inside], kernel[inside])
    return K
