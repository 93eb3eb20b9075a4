"""The measurement: an image → noiseless data, A x, with its exact adjoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError, ShapeError, StructureError
from lapwing.imaging.maps import FunctionMap, LinearMap, MatrixMap, sparse

_MOST_DENSE = 1 << 28  # entries of a matrix that `matrix()` writes out: 2 GiB
_ADJOINT_RTOL = 1e-4  # of ‖A x‖ ‖y‖: functions may compute in float32


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Operator:
    """y = A x for images x of `image_shape` and data y of `data_shape`; axes in front of an image are kept.

    Any linear operator: a matrix (dense, torch sparse or scipy sparse) from flat images, row by row, to flat data; or
    two functions of one image and of one datum. `data_shape` is flat where nothing else is said. Functions are tried on
    a few random vectors: the second must be the adjoint of the first.
    """

    image_shape: tuple[int, ...]
    data_shape: tuple[int, ...]
    linear: LinearMap
    filtered: Callable[[Tensor], Tensor] | None
    name: str

    def __init__(
        self,
        matrix: Any = None,
        image_shape: Any = None,
        *,
        data_shape: Any = None,
        forward: Callable[[Any], Any] | None = None,
        adjoint: Callable[[Any], Any] | None = None,
        fbp: Callable[[Tensor], Tensor] | None = None,
        name: str = "operator",
    ) -> None:
        images = shape_of("image_shape", image_shape)
        if isinstance(matrix, LinearMap):
            linear, shape = matrix, None
        elif matrix is not None:
            if forward is not None or adjoint is not None:
                raise InputTypeError("Operator: give a matrix, or forward= and adjoint=, not both.")
            linear, shape = MatrixMap(_as_matrix(matrix)), None
        else:
            linear, shape = _of_functions(forward, adjoint, images)
        data = shape or (linear.m,)
        if data_shape is not None:
            data = shape_of("data_shape", data_shape)
        _check_sizes(linear, images, data)
        values = (images, data, linear, fbp, name)
        for field_, value in zip(("image_shape", "data_shape", "linear", "filtered", "name"), values, strict=True):
            object.__setattr__(self, field_, value)
        if isinstance(linear, FunctionMap):
            _check_functions(self)

    def __repr__(self) -> str:
        return f"Operator({self.name}, images {self.image_shape} → data {self.data_shape})"

    def __call__(self, image: Any) -> Tensor:
        """A x."""
        x = self._given(image, self.image_shape, "an image")
        lead = x.shape[: x.ndim - len(self.image_shape)]
        return self.linear(x.reshape(*lead, -1)).reshape(*lead, *self.data_shape)

    def adjoint(self, data: Any) -> Tensor:
        """Aᵀ y."""
        y = self._given(data, self.data_shape, "data")
        lead = y.shape[: y.ndim - len(self.data_shape)]
        return self.linear.transposed(y.reshape(*lead, -1)).reshape(*lead, *self.image_shape)

    def fbp(self, data: Any) -> Tensor:
        """The filtered back-projection, of projections only."""
        if self.filtered is None:
            raise StructureError(
                f"{self!r} has no filtered back-projection: that is for lw.imaging.radon. Use A.adjoint(data), or give "
                "a first reconstruction of your own: Operator(..., fbp=function)."
            )
        return self.filtered(self._given(data, self.data_shape, "data"))

    @property
    def has_fbp(self) -> bool:
        return self.filtered is not None

    def matrix(self) -> Float[Tensor, "m d"]:
        """A written out, dense and in float64; `sparse_matrix()` has the same as stored."""
        if self.linear.m * self.linear.d > _MOST_DENSE:
            raise StructureError(
                f"matrix: {self.linear.m} × {self.linear.d} entries are too many to write out (at most {_MOST_DENSE}). "
                "A.sparse_matrix() is the matrix as it is stored; A(image) and A.adjoint(data) need none."
            )
        if isinstance(self.linear, MatrixMap):
            return self.linear.matrix.to_dense().clone()
        return self.linear(torch.eye(self.linear.d, dtype=torch.float64)).T.contiguous()

    def sparse_matrix(self) -> Tensor:
        """A in compressed rows (torch CSR, float64), of an operator that was made of a matrix."""
        if not isinstance(self.linear, MatrixMap):
            raise StructureError(f"{self!r} is not stored as a matrix; A.matrix() writes it out.")
        return self.linear.matrix if self.linear.matrix.layout == torch.sparse_csr else _csr(self.linear.matrix)

    def _given(self, value: Any, shape: tuple[int, ...], what: str) -> Tensor:
        x = as_tensor(value, what)
        if tuple(x.shape[x.ndim - len(shape) :]) != shape or x.ndim < len(shape):
            raise ShapeError(
                f"{self!r} was given {what} of shape {tuple(x.shape)}; expected {shape}, with any axes in front."
            )
        return x


def as_tensor(value: Any, what: str) -> Tensor:
    """A tensor of real floating-point numbers, out of what people have."""
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(np.asarray(value))
        except (TypeError, ValueError) as error:
            raise InputTypeError(f"Expected {what} as a tensor or array, got {type(value).__name__}.") from error
    if value.is_complex():
        raise InputTypeError(
            f"Expected {what} of real numbers, got {value.dtype}. Complex data are two real numbers each: "
            "torch.stack([y.real, y.imag])."
        )
    return value if value.is_floating_point() else value.double()


def shape_of(argument: str, shape: Any) -> tuple[int, ...]:
    """(n, n) out of n, or the sizes as they are."""
    if shape is None:
        raise InputTypeError(
            f"Operator: {argument} is needed, such as (64, 64): images are flat vectors to a matrix, and functions are "
            "tried out on images of this shape."
        )
    sizes = (shape, shape) if isinstance(shape, int) and not isinstance(shape, bool) else shape
    try:
        sizes = tuple(int(size) for size in sizes)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"Operator: {argument} must be sizes such as (64, 64), got {shape!r}.") from error
    if not sizes or min(sizes) < 1:
        raise InputError(f"Operator: {argument} must hold positive sizes, got {shape!r}.")
    return sizes


def _as_matrix(matrix: Any) -> Tensor:
    """Float64, dense or in compressed rows. scipy's matrices say what they hold, so scipy itself is not needed."""
    if type(matrix).__module__.startswith("scipy.sparse"):
        coo = matrix.tocoo()
        entries = np.asarray(coo.data)
        if np.iscomplexobj(entries):
            raise InputTypeError("Operator: the matrix is complex; stack its real and imaginary parts.")
        at = torch.from_numpy(np.stack([coo.row, coo.col]).astype(np.int64))
        found = sparse(at, torch.from_numpy(entries.astype(np.float64)), tuple(coo.shape))
    elif isinstance(matrix, Tensor) and matrix.layout != torch.strided:
        found = _csr(matrix.detach())
    else:
        found = as_tensor(matrix, "a matrix").detach().double().clone()
    if found.ndim != 2 or 0 in found.shape:
        raise ShapeError(f"Operator: expected a matrix of (data, pixels), got the shape {tuple(found.shape)}.")
    values = found.values() if found.layout == torch.sparse_csr else found
    if not bool(torch.isfinite(values).all()):
        raise InputError("Operator: the matrix holds NaN or infinite entries.")
    return found


def _csr(matrix: Tensor) -> Tensor:
    coo = matrix.to_sparse_coo().coalesce()
    return sparse(coo.indices(), coo.values(), tuple(coo.shape))


def _of_functions(
    forward: Callable[[Any], Any] | None, adjoint: Callable[[Any], Any] | None, images: tuple[int, ...]
) -> tuple[FunctionMap, tuple[int, ...]]:
    if not (callable(forward) and callable(adjoint)):
        raise InputTypeError(
            "Operator: give a matrix, or two functions: Operator(image_shape=(n, n), forward=f, adjoint=g), f of an "
            "image and g of data."
        )
    try:
        shape = tuple(torch.as_tensor(forward(torch.zeros(images, dtype=torch.float64))).shape)
    except Exception as error:
        raise InputError(
            f"Operator: forward raised {type(error).__name__} on an image of zeros (float64, {images}): {error}"
        ) from error
    return FunctionMap(images, shape, forward, adjoint), shape


def _check_sizes(linear: LinearMap, images: tuple[int, ...], data: tuple[int, ...]) -> None:
    if linear.d != prod(images):
        raise ShapeError(
            f"Operator: the matrix has {linear.d} columns, but images of shape {images} have {prod(images)} pixels."
        )
    if linear.m != prod(data):
        raise ShapeError(f"Operator: A gives {linear.m} data, but data_shape {data} holds {prod(data)}.")


def _check_functions(A: Operator) -> None:
    """⟨A x, y⟩ = ⟨x, Aᵀ y⟩ and A (x + 2 x') = A x + 2 A x' for random vectors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, *A.image_shape, dtype=torch.float64, generator=generator)
    y = torch.randn(4, *A.data_shape, dtype=torch.float64, generator=generator)
    try:
        Ax = A(x)
        Ay = A.adjoint(y)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"Operator: forward and adjoint must map images {A.image_shape} to data {A.data_shape} and back: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (bool(torch.isfinite(Ax).all()) and bool(torch.isfinite(Ay).all())):
        raise InputError("Operator: forward or adjoint gave NaN or infinite values for finite random vectors.")
    left, right = (Ax * y).flatten(1).sum(1), (x * Ay).flatten(1).sum(1)
    size = Ax.flatten(1).norm(dim=1) * y.flatten(1).norm(dim=1)
    worst = float(((left - right).abs() / size.clamp(min=1e-300)).max())
    if worst > _ADJOINT_RTOL:
        raise InputError(
            f"Operator: adjoint is not the adjoint of forward. ⟨A x, y⟩ and ⟨x, Aᵀ y⟩ differ by {worst:.2g} of "
            f"‖A x‖ ‖y‖ for random x and y (at most {_ADJOINT_RTOL:g}), for instance {float(left[0]):.6g} against "
            f"{float(right[0]):.6g}. For a matrix that is its transpose; a back-projection with a filter is none."
        )
    off = (A(x[0] + 2 * x[1]) - Ax[0] - 2 * Ax[1]).norm() / (Ax[0].norm() + Ax[1].norm()).clamp(min=1e-300)
    if float(off) > _ADJOINT_RTOL:
        raise InputError(
            f"Operator: forward is not linear: A (x + 2 x') and A x + 2 A x' differ by {float(off):.2g} of their size. "
            "Take constants and rectifications out of it."
        )
