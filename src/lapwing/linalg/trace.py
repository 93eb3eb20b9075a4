"""The trace of a matrix from products with it: Hutchinson, Hutch++, and a pilot that chooses between them.

    tr A = E zᵀ A z,  E z zᵀ = I   (Hutchinson, 1990)
    tr A = tr QᵀAQ + E zᵀ (I − QQᵀ) A (I − QQᵀ) z,  Q a basis of A Ω   (Hutch++; Meyer et al., 2021)

Hutch++ wins where few directions carry the trace; where the matrix is nearly diagonal, or its spectrum flat, signs
alone do better.
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


def trace(mv: Product, p: int, *, n_products: int, generator: torch.Generator) -> Estimated:
    """tr A with about n_products products, by whichever way a third of them find the better.

    The pilot measures the variance of a probe with and without the leading directions taken out.
    """
    k = max(2, n_products // 9)
    sketch, pilot = signs(k, p, generator), signs(max(k, 2), p, generator)
    Y = mv(sketch)
    exact, deflated = _deflated(mv, Y, pilot)
    plain = torch.cat([torch.einsum("mp,mp->m", sketch, Y), torch.einsum("mp,mp->m", pilot, mv(pilot))])
    left = max(n_products - 4 * k, 2)
    more = signs(left, p, generator)
    if float(deflated.var()) < float(plain.var()):
        _, others = _deflated(mv, Y, more)
        return Estimated.of(torch.cat([deflated, others]), exact)
    return Estimated.of(torch.cat([plain, torch.einsum("mp,mp->m", more, mv(more))]))


def _deflated(mv: Product, Y: Float[Tensor, "k p"], probes: Float[Tensor, "m p"]) -> tuple[float, Float[Tensor, " m"]]:
    """tr QᵀAQ for Q a basis of Y, and zᵀAz for the probes with Q taken out of them."""
    Q = torch.linalg.qr(Y.T).Q.T
    exact = float(torch.einsum("kp,kp->", Q, mv(Q)))
    z = probes - (probes @ Q.T) @ Q
    return exact, torch.einsum("mp,mp->m", z, mv(z))
