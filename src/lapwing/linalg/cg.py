"""Preconditioned conjugate gradients for several right-hand sides at once (Hestenes and Stiefel, 1952).

Right-hand sides are rows (m, p). One product with the matrix serves all of them, but each has its own step sizes, and
those that have converged take no further part. The stopping criterion is the residual norm √(rᵀM⁻¹r); it is close to
the energy norm of the error, √(eᵀAe), when the preconditioner M is close to A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError, NumericalError, warn

Product = Callable[[Tensor], Tensor]  # (m, p) → (m, p), linear

_REPLACED_EVERY = 50  # iterations between residuals r = b − A x computed directly: the recurrence accumulates rounding
_PATIENCE = 200  # iterations without progress after which the rounding error of the products is taken to dominate


@dataclass(frozen=True, eq=False)
class Solution:
    """Solution x ≈ A⁻¹ b with convergence information."""

    x: Float[Tensor, "m p"]
    residuals: Float[Tensor, " m"]  # √(rᵀM⁻¹r / bᵀM⁻¹b)
    iterations: int
    converged: bool
    indefinite: bool  # a search direction with pᵀAp ≤ 0 was found: A is not positive definite
    history: tuple[float, ...]  # the largest residual after each iteration
    alphas: Float[Tensor, "k m"]  # step lengths α; zero once a right-hand side has converged
    betas: Float[Tensor, "k m"]  # β of the search directions, p ← z + β p

    def tridiagonal(self, i: int) -> tuple[Float[Tensor, " j"], Float[Tensor, " _"]]:
        """Diagonal and off-diagonal of the Lanczos matrix T of M^-½ A M^-½ for right-hand side i.

        T_jj = 1/α_j + β_{j−1}/α_{j−1},  T_{j,j+1} = √β_j / α_j.  Golub and Van Loan, section 10.2.
        So a solve also gives the Lanczos quadrature of log det without further products.
        """
        alpha = self.alphas[:, i][self.alphas[:, i] > 0]
        beta = self.betas[: len(alpha), i]
        diagonal = 1 / alpha
        diagonal[1:] = diagonal[1:] + beta[:-1] / alpha[:-1]
        return diagonal, beta[:-1].sqrt() / alpha[:-1]


def conjugate_gradients(
    mv: Product,
    b: Float[Tensor, "m p"],
    *,
    precondition: Product = lambda r: r,
    rtol: float = 1e-6,
    max_iterations: int = 1000,
) -> Solution:
    """Solve A x = b for positive definite A; `precondition` is v → M⁻¹v, with M positive definite and close to A."""
    state = _State(mv, precondition, b)
    worst: list[float] = []
    steps: list[Tensor] = []
    betas: list[Tensor] = []
    while bool((active := state.residuals > rtol).any()) and len(worst) < max_iterations and not _stalled(worst):
        alpha, beta = state.advance(active, anew=len(worst) % _REPLACED_EVERY == _REPLACED_EVERY - 1)
        if state.indefinite:
            break
        steps.append(alpha)
        betas.append(beta)
        worst.append(float(state.residuals.max()))
    empty = b.new_zeros(0, len(b))
    return Solution(
        state.x,
        state.residuals,
        len(worst),
        bool((state.residuals <= rtol).all()),
        state.indefinite,
        tuple(worst),
        torch.stack(steps) if steps else empty,
        torch.stack(betas) if betas else empty,
    )


class _State:
    """Iterates x, residuals r, z = M⁻¹r and search directions p, one row per right-hand side."""

    def __init__(self, mv: Product, precondition: Product, b: Float[Tensor, "m p"]) -> None:
        self.mv, self.precondition, self.b = mv, precondition, b
        self.x, self.r = torch.zeros_like(b), b.clone()
        self.z = precondition(self.r)
        self.p, self.rz = self.z.clone(), _dots(self.r, self.z)
        self.start, self.indefinite = self.rz.clone(), False

    @property
    def residuals(self) -> Float[Tensor, " m"]:
        ratio = self.rz.clamp(min=0) / torch.where(self.start > 0, self.start, 1.0)
        return ratio.sqrt()

    def advance(self, active: Tensor, *, anew: bool) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
        """One iteration of the active right-hand sides; α and β, zero for the others.

        `anew` computes the residual from its definition instead of the recurrence.
        """
        p = self.p[active]
        Ap = self.mv(p)
        curvature = _dots(p, Ap)
        if not bool((curvature > 0).all()):  # `not all >` is also true for NaN
            self.indefinite = True
            return curvature, curvature  # not used: the caller stops
        alpha = self.rz[active] / curvature
        self.x[active] += alpha[:, None] * p
        r = self.b[active] - self.mv(self.x[active]) if anew else self.r[active] - alpha[:, None] * Ap
        z = self.precondition(r)
        rz = _dots(r, z)
        beta = (rz / self.rz[active]).clamp(min=0)
        self.r[active], self.z[active], self.rz[active] = r, z, rz
        self.p[active] = z + beta[:, None] * p
        return _scattered(alpha, active), _scattered(beta, active)


def _dots(a: Float[Tensor, "m p"], b: Float[Tensor, "m p"]) -> Float[Tensor, " m"]:
    return torch.einsum("mp,mp->m", a, b)


def _scattered(values: Tensor, where: Tensor) -> Tensor:
    """Values at the True entries of a mask, zero elsewhere."""
    whole = values.new_zeros(len(where))
    whole[where] = values
    return whole


def _stalled(worst: list[float]) -> bool:
    """Whether the best residual has not halved within the last `_PATIENCE` iterations."""
    return len(worst) > _PATIENCE and min(worst[-_PATIENCE:]) > 0.5 * min(worst[:-_PATIENCE])


@dataclass(frozen=True)
class CG:
    """Conjugate gradients until the relative residual is below `rtol`, with at most `max_iterations` iterations."""

    rtol: float = 1e-6
    max_iterations: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.rtol < 1:
            raise InputError(f"CG: rtol must lie between 0 and 1, got {self.rtol}.")
        if isinstance(self.max_iterations, bool) or not isinstance(self.max_iterations, int):
            raise InputTypeError(f"CG: max_iterations must be a whole number, got {self.max_iterations!r}.")
        if self.max_iterations < 1:
            raise InputError(f"CG: max_iterations must be at least 1, got {self.max_iterations}.")

    def __call__(self, mv: Product, b: Float[Tensor, "m p"], precondition: Product) -> Solution:
        """Solve; raise a NumericalError if the matrix is not positive definite, warn if `rtol` was not reached."""
        found = conjugate_gradients(
            mv, b, precondition=precondition, rtol=self.rtol, max_iterations=self.max_iterations
        )
        if found.indefinite:
            raise NumericalError(
                f"Conjugate gradients met a direction without positive curvature after {found.iterations} iterations: "
                "the precision is not positive definite in the network's precision. Use a larger prior precision, or a "
                "network in float64 (model.double())."
            )
        if not found.converged:
            warn(
                f"Conjugate gradients stopped after {found.iterations} iterations at a relative residual of "
                f"{float(found.residuals.max()):.1g}, above rtol = {self.rtol:g}. Networks in float32 have a floor: "
                "use CG(rtol=1e-4), a network in float64 (model.double()), or more max_iterations.",
            )
        return found
