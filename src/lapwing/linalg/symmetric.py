"""In-place Gram products H ← H + MᵀM that compute only the upper block triangle of the symmetric result."""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor

BLOCK = 128


def add_gram_(H: Float[Tensor, "p p"], M: Float[Tensor, "n p"]) -> None:
    """Add MᵀM to the upper block triangle of H, in place: about half the operations of the full product."""
    for start in range(0, len(H), BLOCK):
        rows = slice(start, start + BLOCK)
        H[rows, start:].addmm_(M[:, rows].T, M[:, start:])


def mirror_(H: Float[Tensor, "p p"]) -> Float[Tensor, "p p"]:
    """Copy the upper triangle below the diagonal, in place."""
    for start in range(0, len(H), BLOCK):
        stop = start + BLOCK
        H[stop:, start:stop] = H[start:stop, stop:].T
        corner = H[start:stop, start:stop]
        corner.copy_(torch.triu(corner) + torch.triu(corner, 1).T)
    return H
