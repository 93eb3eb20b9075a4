"""Stochastic trace estimation of a symmetric matrix A from products A v: Hutchinson, Hutch++ and XTrace.

    tr A = E zᵀ A z,  E z zᵀ = I   (Hutchinson, 1990)
    tr A = tr QᵀAQ + E zᵀ (I − QQᵀ) A (I − QQᵀ) z,  Q a basis of A Ω   (Hutch++; Meyer et al., 2021)
    the same with each probe in turn left out of Ω and used as z, averaged   (XTrace; Epperly et al., 2024)

Hutch++ and XTrace have the lower variance when a few eigenvalues dominate the trace. Hutchinson's estimator is better
when the matrix is nearly diagonal or its spectrum flat. `trace` compares both on a small pilot sample.
"""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg.cg import Product
from lapwing.linalg.estimated import Estimated


def signs(n: int, p: int, generator: torch.Generator) -> Float[Tensor, "n p"]:
    """Rademacher probes, independent ±1: the lowest variance of all probes with independent entries."""
    bits = torch.randint(2, (n, p), generator=generator, device=generator.device)
    return 2.0 * bits.double() - 1.0


def hutchinson(mv: Product, probes: Float[Tensor, "m p"]) -> Estimated:
    """Hutchinson's estimate (1/m) Σ zᵀ A z; m products with A."""
    return Estimated.of(torch.einsum("mp,mp->m", probes, mv(probes)))


def hutch_plus_plus(mv: Product, sketch: Float[Tensor, "k p"], probes: Float[Tensor, "m p"]) -> Estimated:
    """Hutch++ with a sketch of k vectors; 2k + m products with A, exact if the rank of A is at most k."""
    exact, values = _deflated(mv, mv(sketch), probes)
    return Estimated.of(values, exact)


def xtrace(mv: Product, probes: Float[Tensor, "m p"]) -> Estimated:
    """XTrace; 2m products with A, exact if the rank of A is at most m − 1.

    The m values share a basis, so they are not independent; their standard error is an approximation.
    """
    Y = mv(probes)
    Q = _basis(Y)
    return Estimated.of(_exchanged(probes, Y, Q, mv(Q)))


def trace(mv: Product, p: int, *, n_products: int, generator: torch.Generator) -> Estimated:
    """tr A with about n_products products, by Hutchinson or XTrace, whichever has the smaller variance in a pilot.

    The pilot is a small XTrace; the values zᵀAz of its probes give the variance of Hutchinson's estimator. All of its
    products are reused: the QR basis of a longer sketch begins with the pilot's basis.
    """
    m = max(3, n_products // 2)
    k = max(3, m // 3)
    probes = signs(k, p, generator)
    Y = mv(probes)
    Q = _basis(Y)
    AQ, plain = mv(Q), torch.einsum("mp,mp->m", probes, Y)  # `plain`: Hutchinson's values zᵀAz of the pilot
    n_hutchinson = max(2 * (m - k), 0)  # one product per probe, where XTrace takes two
    exchanged = _exchanged(probes, Y, Q, AQ)
    if float(plain.var()) / (k + n_hutchinson) <= float(exchanged.var()) / m:
        more = signs(n_hutchinson, p, generator)
        return Estimated.of(torch.cat([plain, torch.einsum("mp,mp->m", more, mv(more))]) if len(more) else plain)
    if m == k:
        return Estimated.of(exchanged)
    more = signs(m - k, p, generator)
    probes, Y = torch.cat([probes, more]), torch.cat([Y, mv(more)])
    added = _basis(Y)[k:]  # QR is nested: the first k rows are the pilot's Q, whose products AQ are known
    return Estimated.of(_exchanged(probes, Y, torch.cat([Q, added]), torch.cat([AQ, mv(added)])))


def _basis(Y: Float[Tensor, "m p"]) -> Float[Tensor, "m p"]:
    """Orthonormal rows with the same span as the rows of Y. The first j rows span the first j rows of Y."""
    return torch.linalg.qr(Y.T).Q.T


def _exchanged(
    probes: Float[Tensor, "m p"], Y: Float[Tensor, "m p"], Q: Float[Tensor, "m p"], AQ: Float[Tensor, "m p"]
) -> Float[Tensor, " m"]:
    """The m values of XTrace: tr Q_iᵀAQ_i + zᵀAz with z = (I − Q_i Q_iᵀ) ω_i, Q_i the basis of A Ω without ω_i.

    Q_i is not computed by a QR of its own: Q_i Q_iᵀ = Q (I − s sᵀ) Qᵀ, where s is orthogonal to all columns of R but
    the i-th, which makes it the i-th column of R⁻ᵀ, normalised.
    """
    R, H = Q @ Y.T, AQ @ Q.T
    tiny = torch.finfo(R.dtype).eps * R.norm().clamp(min=1.0)
    pivots = torch.where(R.diagonal().abs() < tiny, tiny, R.diagonal())  # rank-deficient A: s is arbitrary
    upper = R.triu(1) + pivots.diag()
    S = torch.linalg.solve_triangular(upper.T, torch.eye(len(R), dtype=R.dtype, device=R.device), upper=False)
    S = S / S.norm(dim=0)
    W = Q @ probes.T
    X = W - S * (S * W).sum(0)
    basis_part = H.trace() - (S * (H @ S)).sum(0)
    left = torch.einsum("mp,mp->m", probes, Y) - 2 * (X * R).sum(0) + (X * (H @ X)).sum(0)
    return basis_part + left


def _deflated(mv: Product, Y: Float[Tensor, "k p"], probes: Float[Tensor, "m p"]) -> tuple[float, Float[Tensor, " m"]]:
    """tr QᵀAQ for an orthonormal basis Q of Y, and zᵀAz for the probes projected onto its complement."""
    Q = torch.linalg.qr(Y.T).Q.T
    exact = float(torch.einsum("kp,kp->", Q, mv(Q)))
    z = probes - (probes @ Q.T) @ Q
    return exact, torch.einsum("mp,mp->m", z, mv(z))
