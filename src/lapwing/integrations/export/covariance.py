"""Covariances of outputs under constant factors of P⁻¹, layer by layer, in operations that export knows."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from lapwing.errors import StructureError
from lapwing.operators import BlockDiagonalPrecision, DiagonalPrecision, Precision, RotatedPrecision, axes

MOST_DENSE = 20_000  # parameters whose covariance is written into the file


class Part(nn.Module):
    """J P⁻¹ Jᵀ over some of the parameters, from their rows or factors."""

    @abstractmethod
    def forward(self, rows: Tensor) -> Tensor:
        """(B, K, p) → (B, K, K)."""


class Rooted(Part):
    """With a root R of the covariance: (J R)(J R)ᵀ."""

    root: Tensor

    def __init__(self, P: Precision, dtype: torch.dtype) -> None:
        super().__init__()
        if P.p > MOST_DENSE:
            raise StructureError(
                f"export: the covariance of {P.p} parameters would be written into the file, which is refused above "
                f'{MOST_DENSE}. Fit with structure="kron" or "diag", or the last layer alone.'
            )
        covariance = P.solve(torch.eye(P.p, dtype=torch.float64))
        self.register_buffer("root", torch.linalg.cholesky((covariance + covariance.T) / 2).to(dtype))

    def forward(self, rows: Tensor) -> Tensor:
        rooted = rows @ self.root
        return rooted @ rooted.mT


class Diagonal(Part):
    std: Tensor

    def __init__(self, P: DiagonalPrecision, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("std", P.entries.double().rsqrt().to(dtype))

    def forward(self, rows: Tensor) -> Tensor:
        rooted = rows * self.std
        return rooted @ rooted.mT


class Rotated(Part):
    """A Kronecker block: rows as matrices (B, K, o, i), or as factors where there is one position."""

    U_B: Tensor
    U_A: Tensor
    inverse: Tensor

    def __init__(self, P: RotatedPrecision, dtype: torch.dtype) -> None:
        super().__init__()
        U_B, U_A = P.basis.at(torch.float64)
        if len(U_B) != 1:
            raise StructureError("export: grouped convolutions are not written out.")
        self.register_buffer("U_B", U_B.to(dtype))
        self.register_buffer("U_A", U_A.to(dtype))
        self.register_buffer("inverse", P.basis.spread(P.E.double().reciprocal())[0].to(dtype))

    def forward(self, rows: Tensor) -> Tensor:
        left = axes.along(rows.mT[:, :, None], self.U_B).mT
        turned = axes.along(left, self.U_A)[:, :, 0] * self.inverse.sqrt()
        flat = turned.flatten(2)
        return flat @ flat.mT

    def of_factors(self, g: Tensor, a: Tensor) -> Tensor:
        """Gradients (B, K, o) and inputs (B, i)."""
        turned = axes.along(g[:, None], self.U_B)[:, 0]
        weights = axes.along(a[:, None, None], self.U_A)[:, 0, 0].square() @ self.inverse.mT
        return (turned * weights[:, None]) @ turned.mT


def parts(precision: Precision, dtype: torch.dtype) -> list[tuple[slice, Part]]:
    """The blocks of P⁻¹ and where they stand."""
    if isinstance(precision, BlockDiagonalPrecision):
        return [(s, _part(P, dtype)) for s, P in zip(precision.slices, precision.blocks, strict=True)]
    return [(slice(0, precision.p), _part(precision, dtype))]


def _part(P: Precision, dtype: torch.dtype) -> Part:
    if not P.has_weights:
        raise StructureError("export: outputs that share no weights are not written out.")
    if isinstance(P, DiagonalPrecision):
        return Diagonal(P, dtype)
    return Rotated(P, dtype) if isinstance(P, RotatedPrecision) else Rooted(P, dtype)
