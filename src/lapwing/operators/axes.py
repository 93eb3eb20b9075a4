"""Eigenvectors U (q, d, r) of one side of a layer: all r = d of them, or the r < d leading ones.

Leading ones leave a subspace in which all eigenvalues are equal, ρ. A vector is then written in r + d numbers instead
of d: its coordinates z = Uᵀx and what they leave of it, x − U z. This is an isometry, and

    f(U diag(s) Uᵀ + ρ (I − U Uᵀ)) = Q diag(f(s), f(ρ), …, f(ρ)) Qᵀ,   Q = [U, I − U Uᵀ],   Q Qᵀ = I,

so that what is diagonal in all eigenvectors is diagonal in these coordinates too. Eigenvalues come as (s, ρ), r + 1.
"""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor


def whole(U: Float[Tensor, "q d r"]) -> bool:
    """Whether these are all eigenvectors."""
    return U.shape[1] == U.shape[2]


def width(U: Float[Tensor, "q d r"]) -> int:
    """Numbers that a vector is written in."""
    return U.shape[2] if whole(U) else U.shape[2] + U.shape[1]


def distinct(U: Float[Tensor, "q d r"]) -> int:
    """Number of eigenvalues, ρ counted once."""
    return U.shape[2] if whole(U) else U.shape[2] + 1


def multiplicities(U: Float[Tensor, "q d r"]) -> Float[Tensor, " k"]:
    """How often each of the eigenvalues stands: ρ in d − r directions."""
    counts = torch.ones(distinct(U), dtype=torch.float64, device=U.device)
    if not whole(U):
        counts[-1] = U.shape[1] - U.shape[2]
    return counts


def shares(U: Float[Tensor, "q d r"]) -> Float[Tensor, " w"]:
    """How much every coordinate counts in a sum over the d eigenvalues: the d that stand for d − r, in part."""
    ones = torch.ones(width(U), dtype=torch.float64, device=U.device)
    if not whole(U):
        ones[U.shape[2] :] = 1 - U.shape[2] / U.shape[1]
    return ones


def along(x: Float[Tensor, "... q n d"], U: Float[Tensor, "q d r"]) -> Float[Tensor, "... q n w"]:
    """Rows x in the coordinates: x Q."""
    z = x @ U
    return z if whole(U) else torch.cat([z, x - z @ U.mT], -1)


def completed(z: Float[Tensor, "... q r"], x: Tensor, U: Float[Tensor, "q d r"]) -> Float[Tensor, "... q w"]:
    """The coordinates of vectors x (..., q, d), of which z = Uᵀx is known already."""
    return z if whole(U) else torch.cat([z, x - torch.einsum("...qr,qdr->...qd", z, U)], -1)


def back(z: Float[Tensor, "... q n w"], U: Float[Tensor, "q d r"]) -> Float[Tensor, "... q n d"]:
    """Rows from their coordinates: z Qᵀ."""
    if whole(U):
        return z @ U.mT
    z, rest = z.split([U.shape[2], U.shape[1]], -1)
    return (z - rest @ U) @ U.mT + rest


def squares(U: Float[Tensor, "q d r"]) -> Float[Tensor, "q d k"]:
    """Share of every entry in every eigenspace, Q² with the columns of ρ added up: diag f(M) = squares @ f(s, ρ)."""
    S = U**2
    return S if whole(U) else torch.cat([S, 1 - S.sum(-1, keepdim=True)], -1)


def spread(values: Float[Tensor, "... k"], U: Float[Tensor, "q d r"]) -> Float[Tensor, "... w"]:
    """One value for every coordinate."""
    if whole(U):
        return values
    s, rest = values.split([U.shape[2], 1], -1)
    return torch.cat([s, rest.expand(*s.shape[:-1], U.shape[1])], -1)
