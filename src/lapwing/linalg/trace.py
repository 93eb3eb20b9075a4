"""The trace of a matrix from products with it: Hutchinson, Hutch++, XTrace, and a pilot that chooses.

    tr A = E zᵀ A z,  E z zᵀ = I   (Hutchinson, 1990)
    tr A = tr QᵀAQ + E zᵀ (I − QQᵀ) A (I − QQᵀ) z,  Q a basis of A Ω   (Hutch++; Meyer et al., 2021)
    the same with every probe in turn left out of Ω, and used as z: their mean   (XTrace; Epperly et al., 2024)

The last two win where few directions carry the trace; where the matrix is nearly diagonal, or its spectrum flat, signs
alone do better. All are for symmetric A.
"""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg.cg import Product
from lapwing.linalg.estimated import Estimated


def signs(n: int, p: int, generator: torch.Generator) -> Float[Tensor, "n p"]:
    """Independent ±1: Rademacher probes, of least variance among those with independent entries."""
    bits = torch.randint(2, (n, p), generator=generator, device=generator.device)
    return 2.0 * bits.double() - 1.0


def hutchinson(mv: Product, probes: Float[Tensor, "m p"]) -> Estimated:
    """m products."""
    return Estimated.of(torch.einsum("mp,mp->m", probes, mv(probes)))


def hutch_plus_plus(mv: Product, sketch: Float[Tensor, "k p"], probes: Float[Tensor, "m p"]) -> Estimated:
    """2k + m products; exact when A has rank k at most."""
    exact, values = _deflated(mv, mv(sketch), probes)
    return Estimated.of(values, exact)


def xtrace(mv: Product, probes: Float[Tensor, "m p"]) -> Estimated:
    """2m products; exact when A has rank m − 1 at most. The m values share a basis: their spread is a good guide to the
    error, but they are not independent."""
    Y = mv(probes)
    Q = _basis(Y)
    return Estimated.of(_exchanged(probes, Y, Q, mv(Q)))


def trace(mv: Product, p: int, *, n_products: int, generator: torch.Generator) -> Estimated:
    """tr A with about n_products products: signs alone, or XTrace, whichever a pilot finds the better.

    The pilot is a small XTrace; its probes' own zᵀAz say what signs alone would do. Nothing of it is thrown away:
    a longer sketch has the pilot's basis as its beginning.
    """
    m = max(3, n_products // 2)
    k = max(3, m // 3)
    probes = signs(k, p, generator)
    Y = mv(probes)
    Q = _basis(Y)
    AQ, plain = mv(Q), torch.einsum("mp,mp->m", probes, Y)
    left_to_signs = max(2 * (m - k), 0)
    exchanged = _exchanged(probes, Y, Q, AQ)
    if float(plain.var()) / (k + left_to_signs) <= float(exchanged.var()) / m:
        more = signs(left_to_signs, p, generator)
        return Estimated.of(torch.cat([plain, torch.einsum("mp,mp->m", more, mv(more))]) if len(more) else plain)
    if m == k:
        return Estimated.of(exchanged)
    more = signs(m - k, p, generator)
    probes, Y = torch.cat([probes, more]), torch.cat([Y, mv(more)])
    added = _basis(Y)[k:]
    return Estimated.of(_exchanged(probes, Y, torch.cat([Q, added]), torch.cat([AQ, mv(added)])))


def _basis(Y: Float[Tensor, "m p"]) -> Float[Tensor, "m p"]:
    """Orthonormal rows that span those of Y; the first few are those of the first few."""
    return torch.linalg.qr(Y.T).Q.T


def _exchanged(
    probes: Float[Tensor, "m p"], Y: Float[Tensor, "m p"], Q: Float[Tensor, "m p"], AQ: Float[Tensor, "m p"]
) -> Float[Tensor, " m"]:
    """tr Q_iᵀAQ_i + zᵀAz with Q_i taken out of z = ω_i, where Q_i is the basis without its i-th product.

    Q_i Q_iᵀ = Q (I − s sᵀ) Qᵀ with s orthogonal to all columns of R but the i-th: a column of R⁻ᵀ, normalised.
    """
    R, H = Q @ Y.T, AQ @ Q.T
    tiny = torch.finfo(R.dtype).eps * R.norm().clamp(min=1.0)
    pivots = torch.where(R.diagonal().abs() < tiny, tiny, R.diagonal())  # A of a smaller rank: any s will do
    upper = R.triu(1) + pivots.diag()
    S = torch.linalg.solve_triangular(upper.T, torch.eye(len(R), dtype=R.dtype, device=R.device), upper=False)
    S = S / S.norm(dim=0)
    W = Q @ probes.T
    X = W - S * (S * W).sum(0)
    basis_part = H.trace() - (S * (H @ S)).sum(0)
    left = torch.einsum("mp,mp->m", probes, Y) - 2 * (X * R).sum(0) + (X * (H @ X)).sum(0)
    return basis_part + left


def _deflated(mv: Product, Y: Float[Tensor, "k p"], probes: Float[Tensor, "m p"]) -> tuple[float, Float[Tensor, " m"]]:
    """tr QᵀAQ for Q a basis of Y, and zᵀAz for the probes with Q taken out of them."""
    Q = torch.linalg.qr(Y.T).Q.T
    exact = float(torch.einsum("kp,kp->", Q, mv(Q)))
    z = probes - (probes @ Q.T) @ Q
    return exact, torch.einsum("mp,mp->m", z, mv(z))
