"""Quadratic forms J P_s⁻¹ Jᵀ under several precisions with the same curvature and different priors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lapwing._types import Float, Tensor
from lapwing.operators.base import Precision, Rows
from lapwing.operators.block_diagonal import BlockDiagonalPrecision
from lapwing.operators.rotated import RotatedPrecision

_INVERSE_FLOATS = 1 << 24  # of inverses at several scales


def inv_quads(precisions: Sequence[Precision], J: Rows) -> Float[Tensor, "s n c c"]:
    """J_n P_s⁻¹ J_nᵀ for every precision s. Kronecker blocks share their eigenbasis, so rows are rotated only once."""
    first = precisions[0]
    if isinstance(first, BlockDiagonalPrecision):
        blocks = zip(*(P.blocks for P in precisions if isinstance(P, BlockDiagonalPrecision)), strict=True)
        parts = (inv_quads(of_block, J.columns(s)) for s, of_block in zip(first.slices, blocks, strict=True))
        total = next(parts)  # accumulate one block at a time: all parts together would be large
        for part in parts:
            total = total + part
        return total
    if isinstance(first, RotatedPrecision):
        return torch.cat([_rotated_once(precisions, piece.rotated(first.basis)) for piece in J.pieces()], dim=1)
    return torch.stack([P.inv_quad(J) for P in precisions])


def _rotated_once(precisions: Sequence[Precision], rows: Rows) -> Float[Tensor, "s n c c"]:
    """The quadratic forms of rows that are in the eigenbasis already.

    Inverse eigenvalues of all scales take S·P numbers: of a very large block, those of one scale at a time are formed.
    """
    rotated = [P for P in precisions if isinstance(P, RotatedPrecision)]
    at_once = max(1, _INVERSE_FLOATS // rows.p)
    parts = [rotated[i : i + at_once] for i in range(0, len(rotated), at_once)]
    return torch.cat([rows.quads(torch.stack([_inverse(P, rows) for P in part])) for part in parts])


def _inverse(P: RotatedPrecision, rows: Rows) -> Float[Tensor, " k"]:
    return P.basis.spread(P.E.reciprocal()).flatten().to(rows.dtype)
