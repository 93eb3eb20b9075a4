"""Linear maps on flat vectors: how a matrix is held, and how it is applied to vectors in front of which axes may stand.

Every map is differentiable, in reverse and in forward mode, as often as one likes, and works under `torch.vmap`: the
derivative of x ↦ A x is A itself, and that of y ↦ Aᵀ y is Aᵀ.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lapwing._types import Float, Tensor


class LinearMap(ABC):
    """A (m, d) matrix, by its products with rows of vectors."""

    m: int
    d: int

    @abstractmethod
    def forward(self, x: Float[Tensor, "k d"]) -> Float[Tensor, "k m"]:
        """A x for each row."""

    @abstractmethod
    def adjoint(self, y: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        """Aᵀ y for each row."""

    def __call__(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... m"]:
        return _Apply.apply(x, self, False)

    def transposed(self, y: Float[Tensor, "... m"]) -> Float[Tensor, "... d"]:
        return _Apply.apply(y, self, True)


@dataclass(eq=False)
class MatrixMap(LinearMap):
    """A stored matrix, dense or sparse (CSR), in float64; other precisions are made once, when they are asked for."""

    matrix: Tensor
    _kept: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def m(self) -> int:  # type: ignore[override]
        return self.matrix.shape[0]

    @property
    def d(self) -> int:  # type: ignore[override]
        return self.matrix.shape[1]

    def forward(self, x: Float[Tensor, "k d"]) -> Float[Tensor, "k m"]:
        return (self._at(x)[0] @ x.T).T

    def adjoint(self, y: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        return (self._at(y)[1] @ y.T).T

    def _at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A and Aᵀ in the precision of x and where it is; a sparse product runs along the rows of either."""
        key = x.dtype, x.device
        if key not in self._kept:
            A = self.matrix.to(device=x.device, dtype=x.dtype)
            self._kept[key] = (A, A.T) if A.layout == torch.strided else (A, _transposed(A))
        return self._kept[key]


@dataclass(frozen=True, eq=False)
class SeparableMap(LinearMap):
    """X ↦ R X Cᵀ for images X (h, w): the matrix is R ⊗ C."""

    rows: Float[Tensor, "a h"]
    columns: Float[Tensor, "b w"]

    @property
    def m(self) -> int:  # type: ignore[override]
        return self.rows.shape[0] * self.columns.shape[0]

    @property
    def d(self) -> int:  # type: ignore[override]
        return self.rows.shape[1] * self.columns.shape[1]

    def forward(self, x: Float[Tensor, "k d"]) -> Float[Tensor, "k m"]:
        images = x.reshape(-1, self.rows.shape[1], self.columns.shape[1])
        return (self.rows.to(x) @ images @ self.columns.to(x).T).reshape(len(x), -1)

    def adjoint(self, y: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        images = y.reshape(-1, self.rows.shape[0], self.columns.shape[0])
        return (self.rows.to(y).T @ images @ self.columns.to(y)).reshape(len(y), -1)


@dataclass(frozen=True, eq=False)
class FourierMap(LinearMap):
    """The entries of the orthonormal discrete Fourier transform where the mask is true: real parts, imaginary parts."""

    mask: Tensor  # (h, w), bool, zero frequency first

    @property
    def m(self) -> int:  # type: ignore[override]
        return 2 * int(self.mask.sum())

    @property
    def d(self) -> int:  # type: ignore[override]
        return self.mask.numel()

    def forward(self, x: Float[Tensor, "k d"]) -> Float[Tensor, "k m"]:
        spectrum = torch.fft.fft2(x.reshape(-1, *self.mask.shape), norm="ortho")
        seen = spectrum[:, self.mask.to(x.device)]
        return torch.cat([seen.real, seen.imag], dim=1)

    def adjoint(self, y: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        # The transform is unitary, so its adjoint as a real map is the real part of the inverse.
        real, imaginary = y.chunk(2, dim=1)
        spectrum = torch.zeros(len(y), *self.mask.shape, dtype=torch.complex(real[:1], real[:1]).dtype, device=y.device)
        spectrum[:, self.mask.to(y.device)] = torch.complex(real.contiguous(), imaginary.contiguous())
        return torch.fft.ifft2(spectrum, norm="ortho").real.reshape(len(y), -1)


@dataclass(frozen=True, eq=False)
class FunctionMap(LinearMap):
    """Two functions of single images and single data, which may leave torch; one call for every vector."""

    image_shape: tuple[int, ...]
    data_shape: tuple[int, ...]
    apply: Callable[[Any], Any]
    back: Callable[[Any], Any]

    @property
    def m(self) -> int:  # type: ignore[override]
        return int(torch.Size(self.data_shape).numel())

    @property
    def d(self) -> int:  # type: ignore[override]
        return int(torch.Size(self.image_shape).numel())

    def forward(self, x: Float[Tensor, "k d"]) -> Float[Tensor, "k m"]:
        return _each(self.apply, x, self.image_shape, self.m)

    def adjoint(self, y: Float[Tensor, "k m"]) -> Float[Tensor, "k d"]:
        return _each(self.back, y, self.data_shape, self.d)


class _Apply(torch.autograd.Function):
    """A x, or Aᵀ x, with its derivatives in every mode."""

    @staticmethod
    def forward(x: Tensor, map_: LinearMap, back: bool) -> Tensor:
        flat = x.detach().reshape(-1, x.shape[-1])
        found = map_.adjoint(flat) if back else map_.forward(flat)
        return found.reshape(*x.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, LinearMap, bool], output: Tensor) -> None:
        _, ctx.map, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return _Apply.apply(g, ctx.map, not ctx.back), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _Apply.apply(tangent, ctx.map, ctx.back)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, map_: LinearMap, back: bool) -> tuple[Tensor, int]:
        return _Apply.apply(x.movedim(in_dims[0], 0), map_, back), 0


def sparse(indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A float64 matrix in compressed rows; entries that are given twice add up."""
    coo = torch.sparse_coo_tensor(indices, values.double(), shape, check_invariants=False).coalesce()
    return _compressed(coo)


def _transposed(A: Tensor) -> Tensor:
    return _compressed(A.to_sparse_coo().T.coalesce())


def _compressed(coo: Tensor) -> Tensor:
    with warnings.catch_warnings():  # torch tells once that its compressed rows are young
        warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
        return coo.to_sparse_csr()


def _each(function: Callable[[Any], Any], x: Float[Tensor, "k d"], shape: tuple[int, ...], n: int) -> Tensor:
    found = [torch.as_tensor(function(row.reshape(shape))).detach().to(x).reshape(-1) for row in x]
    return torch.stack(found) if found else x.new_zeros(0, n)
