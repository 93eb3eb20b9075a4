"""Parallel-beam projections of an image: Joseph's matrix, and the filtered back-projection.

Every ray is followed along the axis it crosses faster, and the image is interpolated linearly along the other (Joseph,
1982). Angle 0 looks along the columns: its data are sums over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2, pi, sqrt
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError
from lapwing.imaging.maps import LinearMap, MatrixMap, sparse
from lapwing.imaging.operator import Operator
from lapwing.runtime.arguments import counted, positive

_PARALLEL = 1e-12  # a cosine or sine below this is zero


def radon(
    n: int, angles: int | Sequence[float] | Tensor, detectors: int | None = None, spacing: float | None = None
) -> Operator:
    """Parallel-beam projections of n × n images of unit pixels: data (angles, detectors).

    `angles`: so many, k π / angles, or their values in radians. `detectors`: an odd number that covers the diagonal
    unless given. `spacing`: the width of a detector in pixels; unless given, the detectors cover the diagonal.
    """
    n = counted("n", n, "pixel")
    theta = _angles(angles)
    count = _covering(n) if detectors is None else counted("detectors", detectors, "detector")
    width = sqrt(2) * n / count if spacing is None else positive("spacing", spacing)
    matrix = joseph_matrix(n, theta, count, width)
    linear = MatrixMap(matrix)
    fbp = FilteredBackProjection(linear, n, len(theta), count)
    name = f"radon, {len(theta)} angles × {count} detectors"
    return Operator(linear, (n, n), data_shape=(len(theta), count), fbp=fbp, name=name)


def joseph_matrix(n: int, theta: Float[Tensor, " a"], detectors: int, spacing: float) -> Tensor:
    """(angles · detectors, n²) in compressed rows.

    With c = (n − 1)/2, x = column − c, y = c − row and u = (d − (detectors − 1)/2) · spacing, a ray is
    x cos θ + y sin θ = u. Where |cos θ| ≥ |sin θ| it meets row y at column (u − y sin θ)/cos θ + c, and the two pixels
    beside that point get (1 − w, w)/|cos θ|; else the same with rows and columns exchanged.
    """
    parts = [_one_angle(n, float(t), k * detectors, detectors, spacing) for k, t in enumerate(theta)]
    rows, columns, values = (torch.cat(each) for each in zip(*parts, strict=True))
    kept = values > 0
    at = torch.stack([rows[kept], columns[kept]])
    return sparse(at, values[kept], (len(theta) * detectors, n * n))


def _one_angle(n: int, theta: float, first: int, detectors: int, spacing: float) -> tuple[Tensor, Tensor, Tensor]:
    t = torch.tensor(theta, dtype=torch.float64)
    cos, sin = (0.0 if abs(v) < _PARALLEL else v for v in (float(t.cos()), float(t.sin())))
    c = (n - 1) / 2
    u = ((torch.arange(detectors, dtype=torch.float64) - (detectors - 1) / 2) * spacing)[:, None]
    along = torch.arange(n)
    centred = along.double()[None] - c
    steep = abs(cos) >= abs(sin)
    if steep:  # along: rows, whose y is c − row
        place, scale = (u + centred * sin) / cos + c, 1 / abs(cos)
    else:  # along: columns
        place, scale = c - (u - centred * cos) / sin, 1 / abs(sin)
    found = (
        [torch.empty(0, dtype=torch.long)],
        [torch.empty(0, dtype=torch.long)],
        [torch.empty(0, dtype=torch.float64)],
    )
    for other, weight in _beside(place):
        inside = (other >= 0) & (other < n)
        pixels = along[None] * n + other if steep else other * n + along[None]
        rays = torch.arange(first, first + detectors)[:, None].expand_as(pixels)
        for kept, values in zip(found, (rays, pixels, weight * scale), strict=True):
            kept.append(values[inside])
    rows, columns, values = (torch.cat(each) for each in found)
    return rows, columns, values


def _beside(place: Float[Tensor, "d n"]) -> Iterator[tuple[Tensor, Tensor]]:
    below = place.floor()
    w = place - below
    yield below.long(), 1 - w
    yield below.long() + 1, w


@dataclass(frozen=True, eq=False)
class FilteredBackProjection:
    """π/angles · Aᵀ (h ∗ y), h the ramp filter in space: 1/4 at 0, −1/(π j)² at odd j.

    The filter in space has no error at zero frequency. The detector's width is in Aᵀ already.
    """

    linear: LinearMap
    n: int
    n_angles: int
    detectors: int

    def __call__(self, data: Float[Tensor, "... a d"]) -> Float[Tensor, "... n n"]:
        size = 2 ** ceil(log2(2 * self.detectors))
        filtered = torch.fft.irfft(torch.fft.rfft(data.double(), n=size) * _ramp_spectrum(size), n=size)
        lead = data.shape[:-2]
        flat = filtered[..., : self.detectors].to(data.dtype).reshape(*lead, -1)
        return (self.linear.transposed(flat) * (pi / self.n_angles)).reshape(*lead, self.n, self.n)


def _ramp_spectrum(size: int) -> Tensor:
    j = torch.fft.fftfreq(size, 1 / size, dtype=torch.float64).round()
    odd = j.abs() % 2 == 1
    kernel = torch.where(odd, -1 / (pi * torch.where(odd, j, 1.0)) ** 2, torch.where(j == 0, 0.25, 0.0))
    return torch.fft.rfft(kernel)


def _covering(n: int) -> int:
    """The smallest odd number of detectors, no wider than a pixel each, that covers the diagonal."""
    least = ceil(sqrt(2) * n)
    return least + 1 - least % 2


def _angles(angles: Any) -> Float[Tensor, " a"]:
    if isinstance(angles, int) and not isinstance(angles, bool):
        if angles < 1:
            raise InputError(f"angles: expected at least 1 angle, got {angles}.")
        return torch.arange(angles, dtype=torch.float64) * (pi / angles)
    try:
        theta = torch.as_tensor(angles, dtype=torch.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputTypeError(
            f"angles: expected a number of angles or their values in radians, got {angles!r}."
        ) from error
    if isinstance(angles, bool | float) or not len(theta):
        raise InputError(f"angles: expected a whole number of angles or a sequence of at least one, got {angles!r}.")
    if not bool(torch.isfinite(theta).all()):
        raise InputError("angles: expected finite values in radians, got NaN or infinity among them.")
    return theta
