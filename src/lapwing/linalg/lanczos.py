"""Lanczos iteration with full reorthogonalisation: matrix functions f(A) b and Gauss quadrature of bᵀ f(A) b.

    A Vᵀ ≈ Vᵀ T,   f(A) b ≈ ‖b‖ Vᵀ f(T) e₁,   bᵀ f(A) b ≈ ‖b‖² e₁ᵀ f(T) e₁.

Every new vector is orthogonalised against all previous ones twice. Without this, rounding produces spurious copies of
converged eigenvalues. The basis is stored: k vectors of length p for every right-hand side. The quadrature follows
Golub and Meurant (2010).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.linalg.cg import Product
from lapwing.linalg.estimated import Estimated

Function = Callable[[Tensor], Tensor]  # f, applied to eigenvalues elementwise

_EXHAUSTED = 1e-13  # relative to T: a remaining vector shorter than this is rounding error


class Krylov:
    """Krylov spaces of m start vectors b (m, p); `extend` adds one dimension to each."""

    def __init__(self, mv: Product, b: Float[Tensor, "m p"]) -> None:
        self.mv = mv
        self.norms = b.norm(dim=1)
        self.basis = (b / torch.where(self.norms > 0, self.norms, 1.0)[:, None])[None]  # (k, m, p)
        self.diagonal = b.new_zeros(0, len(b))  # α of the tridiagonal T, (k, m)
        self.off = b.new_zeros(0, len(b))  # β, the off-diagonal, (k, m)

    def extend(self) -> None:
        """One Lanczos step; one product with the matrix."""
        v = self.basis[-1]
        w = self.mv(v)
        alpha = torch.einsum("mp,mp->m", v, w)
        for _ in range(2):  # twice is enough: once leaves errors where w is small after the projection
            w = w - torch.einsum("kmp,km->mp", self.basis, torch.einsum("kmp,mp->km", self.basis, w))
        beta = w.norm(dim=1)
        if len(self.diagonal):
            # An exhausted space gets decoupled entries: their quadrature weight is zero, and repeating an existing
            # diagonal entry avoids a log of zero.
            ended = self.off[-1] == 0
            alpha = torch.where(ended, self.diagonal[0], alpha)
        self.diagonal = torch.cat([self.diagonal, alpha[None]])
        size = self.diagonal.abs().amax(0)
        beta = torch.where(beta > _EXHAUSTED * size, beta, 0.0)
        self.off = torch.cat([self.off, beta[None]])
        self.basis = torch.cat([self.basis, torch.where(beta > 0, 1 / beta, 0.0)[None, :, None] * w])

    @property
    def exhausted(self) -> bool:
        """Whether all spaces are invariant under A; results are then exact up to rounding."""
        return len(self.off) > 0 and not bool(self.off[-1].any())

    def quadrature(self) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"]]:
        """Gauss quadrature bᵀ f(A) b ≈ Σ w f(node): nodes and weights; exact for polynomials of degree 2k − 1."""
        nodes, Y = self._eigen()
        return nodes, self.norms[:, None] ** 2 * Y[:, 0] ** 2

    def coefficients(self, f: Function) -> Float[Tensor, "m k"]:
        """‖b‖ f(T) e₁, the coefficients of f(A) b in the basis V."""
        nodes, Y = self._eigen()
        return self.norms[:, None] * torch.einsum("mki,mi,mi->mk", Y, f(nodes), Y[:, 0])

    def _eigen(self) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k k"]]:
        off = self.off[:-1].T
        T = torch.diag_embed(self.diagonal.T) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
        return torch.linalg.eigh(T)


@dataclass(frozen=True, eq=False)
class Applied:
    """f(A) b, an estimate of its relative error, and the number of products with A."""

    values: Float[Tensor, "m p"]
    errors: Float[Tensor, " m"]
    steps: int
    converged: bool


def apply_function(
    mv: Product, b: Float[Tensor, "m p"], f: Function, *, rtol: float = 1e-6, max_steps: int = 300
) -> Applied:
    """f(A) b by Lanczos. The error estimate is the change over the last quarter of the steps; stops below rtol."""
    krylov = Krylov(mv, b)
    found: list[Tensor] = []
    errors = b.new_full((len(b),), torch.inf)
    while len(found) < min(max_steps, b.shape[1]):
        krylov.extend()
        found.append(krylov.coefficients(f))
        if krylov.exhausted:
            errors = torch.zeros_like(errors)
            break
        before = _earlier(len(found))
        if before:
            change = found[-1].clone()
            change[:, :before] -= found[before - 1]
            errors = change.norm(dim=1) / found[-1].norm(dim=1).clamp(min=1e-300)
            if bool((errors <= rtol).all()):
                break
    values = torch.einsum("mk,kmp->mp", found[-1], krylov.basis[: found[-1].shape[1]])
    return Applied(values, errors, len(found), bool((errors <= rtol).all()))


def inverse_root(mv: Product, b: Float[Tensor, "m p"], *, rtol: float = 1e-6, max_steps: int = 300) -> Applied:
    """A^-½ b for positive definite A, with the symmetric square root."""
    return apply_function(mv, b, lambda values: values.rsqrt(), rtol=rtol, max_steps=max_steps)


def lanczos_quadrature(
    mv: Product, probes: Float[Tensor, "m p"], f: Function, *, rtol: float = 1e-3, max_steps: int = 100
) -> Estimated:
    """Stochastic Lanczos quadrature: tr f(A) = E zᵀ f(A) z for probes z with E z zᵀ = I.

    Stops when the last quarter of the steps has changed the mean by less than rtol times its standard error, so that
    the quadrature error is negligible beside the reported one. Ubaru, Chen and Saad (2017).
    """
    krylov = Krylov(mv, probes)
    found: list[Tensor] = []
    while len(found) < min(max_steps, probes.shape[1]):
        krylov.extend()
        nodes, weights = krylov.quadrature()
        found.append((weights * f(nodes)).sum(1))
        if krylov.exhausted:
            break
        before = _earlier(len(found))
        if before:
            change = float((found[-1] - found[before - 1]).mean().abs())
            if change <= rtol * Estimated.of(found[-1]).std_error + 1e-12 * float(found[-1].mean().abs()):
                break
    return Estimated.of(found[-1])


def _earlier(steps: int) -> int:
    """Number of steps before the last quarter; 0 while there are too few to estimate the error."""
    return steps - max(2, steps // 4) if steps > 2 else 0
