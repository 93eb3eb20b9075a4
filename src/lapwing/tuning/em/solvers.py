"""Solve P ζ = b for all samples at once: by factorisation, or iteratively by passes over the data.

Both objectives of sample-then-optimise have the Hessian P and the same minimiser:

    ½ Σ_n ‖J_n z − ε_n‖²_Λ + ½ ‖z − θ₀‖²_P₀,      ½ Σ_n ‖J_n z‖²_Λ + ½ ‖z − P₀⁻¹ b‖²_P₀.

They differ only in the variance of minibatch gradients. Antorán et al. (2023), equations 8 and 9.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import Full, GaussNewton, estimate
from lapwing.linalg import CG, conjugate_gradients
from lapwing.linear_model import Piece, StoredPiece
from lapwing.network.products import Source
from lapwing.operators import (
    Curvature,
    DenseCurvature,
    DenseRows,
    GroupedDiagonal,
    LowRankCurvature,
    Precision,
)
from lapwing.posterior import Posterior
from lapwing.posterior.sampling import WeightDraws

_OF_STANDARD_ERROR, _MOST_ITERATIONS = 0.25, 200  # tolerance in standard errors of γ; limit of conjugate gradients


@dataclass(frozen=True, eq=False)
class System:
    """P = Σ_g c_g H_g + P₀, and a preconditioner: a similar precision that is cheap to solve with."""

    P0: GroupedDiagonal
    scales: Float[Tensor, " g"]
    preconditioner: Precision


@dataclass(frozen=True, eq=False)
class Start:
    """Samples of an earlier system as initial values; known products H_g ζ save a pass."""

    draws: WeightDraws
    products: Float[Tensor, "g k p"] | None = None


@dataclass(frozen=True, eq=False)
class Solved:
    """Samples, the accuracy of their solution, and their products H_g ζ."""

    draws: WeightDraws
    products: Float[Tensor, "g k p"]
    residual: float  # largest √(rᵀM⁻¹r / bᵀM⁻¹b) over samples, M the preconditioner
    n_products: int


class Solver(ABC):
    """Solves for the samples under successive priors and noise levels."""

    precise: bool  # exact to rounding, so that the mode should be exact as well

    @abstractmethod
    def parts_mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "g m p"]:
        """H_g v (g, m, p) for each part."""

    @abstractmethod
    def preconditioner(self, posterior: Posterior) -> Precision:
        """The preconditioner under the posterior's prior and noise."""

    @abstractmethod
    def solve(self, start: Start, system: System, *, data_targets: bool) -> Solved:
        """ζ for a new prior and noise, from `start`. `data_targets` selects the first of the two objectives."""


@dataclass(frozen=True, eq=False)
class Direct(Solver):
    """The curvature in memory, as a matrix or, with fewer outputs than parameters, as rows M.

    With rows, the dual system is solved: P⁻¹ = P₀⁻¹ − P₀⁻¹Mᵀ(I + M P₀⁻¹ Mᵀ)⁻¹ M P₀⁻¹.
    """

    parts: tuple[Curvature, ...]
    precise: bool = True

    @classmethod
    def of(cls, posterior: Posterior, source: Source) -> Direct:
        """From the posterior's own curvature if that is the full one, else from one more pass over the data."""
        if posterior.structure.exact and not posterior.structure.streams:
            return cls(posterior.estimate.parts)
        found = estimate(
            posterior.linearised,
            posterior.likelihood,
            source,
            sites=posterior.sites,
            structure=Full(),
            fisher=posterior.fisher,
            chunk_floats=posterior.chunk_floats,
        )
        return cls(found.parts)

    @classmethod
    def written(cls, H: GaussNewton, data: Iterable[Piece], n_parts: int) -> Direct:
        """From rows SᵀJ, or from their Gram matrix if there are more rows than parameters."""
        each = [H.rows_of(piece.f, piece.y, piece.J) for piece in data if isinstance(piece, StoredPiece)]
        parts: list[Curvature] = []
        for g in range(n_parts):
            M = torch.cat([rows[g] for rows in each])
            parts.append(LowRankCurvature.of(DenseRows(M)) if len(M) < H.p else DenseCurvature.of(M.T @ M))
        return cls(tuple(parts), precise=False)

    def parts_mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "g m p"]:
        return torch.stack([part.mv(v) for part in self.parts])

    def preconditioner(self, posterior: Posterior) -> Precision:
        return summed(self.parts, posterior)

    def solve(self, start: Start, system: System, *, data_targets: bool) -> Solved:
        draws = start.draws
        zeta = system.preconditioner.solve(draws.pull(system.P0.diagonal, system.scales))
        found = replace(draws, zeta=zeta, precisions=system.P0.diagonal, scales=system.scales)
        return Solved(found, self.parts_mv(zeta), 0.0, 0)


@dataclass(frozen=True, eq=False)
class Streamed(Solver):
    """Every product with H is a pass over the data."""

    H: GaussNewton
    n_parts: int
    # Nyström sketch of each part for the preconditioner; empty: the posterior's own structure.
    sketch: tuple[Curvature, ...]
    precise = False

    def parts_mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "g m p"]:
        one_hot = torch.eye(self.n_parts, dtype=torch.float64, device=v.device)
        return torch.stack([self.H.mv(v, e) for e in one_hot])

    def preconditioner(self, posterior: Posterior) -> Precision:
        return summed(self.sketch, posterior) if self.sketch else posterior.precision.preconditioner()

    def _solved(self, draws: WeightDraws, system: System, zeta: Tensor, n_products: int) -> Solved:
        """The result with its true residual, not the one that the iteration has accumulated."""
        products = self.parts_mv(zeta)
        b = draws.pull(system.P0.diagonal, system.scales)
        residual = sizes(system, b - times(system, zeta, products)) / sizes(system, b)
        found = replace(draws, zeta=zeta, precisions=system.P0.diagonal, scales=system.scales)
        return Solved(found, products, float(residual.max()), n_products)


@dataclass(frozen=True, eq=False)
class ConjugateGradients(Streamed):
    """Conjugate gradients for the correction to the initial ζ.

    Without a `cg` of the user, they stop when (ζ − P⁻¹b)ᵀ P (ζ − P⁻¹b), which is at most rᵀM⁻¹r for a sketch M ⪯ P, is
    small relative to the standard error √(2γ/K) of γ: more accurate samples would not make γ more accurate.
    """

    cg: CG | None

    def solve(self, start: Start, system: System, *, data_targets: bool) -> Solved:
        """Solve P x = b − P ζ₀ for the correction x to the initial samples ζ₀."""
        draws, cg = start.draws, self.cg or CG(max_iterations=_MOST_ITERATIONS)
        b = draws.pull(system.P0.diagonal, system.scales)
        products = self.parts_mv(draws.zeta) if start.products is None else start.products
        missing = b - times(system, draws.zeta, products)
        wanted = self._tolerance(draws, system, b) if self.cg is None else cg.rtol * sizes(system, b)
        # Tolerances refer to ζ; convert them to the right-hand side of the correction, b − P ζ.
        rtol = float((wanted / sizes(system, missing).clamp(min=1e-300)).min())
        found = conjugate_gradients(
            lambda v: self.H.mv(v, system.scales) + system.P0.diagonal * v,
            missing,
            precondition=system.preconditioner.approximate_solve,
            rtol=rtol,
            max_iterations=cg.max_iterations,
        )
        return self._solved(draws, system, draws.zeta + found.x, found.iterations)

    def _tolerance(self, draws: WeightDraws, system: System, b: Float[Tensor, "k p"]) -> Float[Tensor, ""]:
        """The tolerance for √(rᵀM⁻¹r), with γ estimated from the previous samples or from the sketch."""
        before = draws.precisions.sqrt() * draws.zeta
        sketched = system.P0.diagonal.sqrt() * system.preconditioner.solve(b)
        gamma = max(float((draws.prior * (draws.prior - zeta)).sum()) / len(b) for zeta in (before, sketched))
        return b.new_tensor(_OF_STANDARD_ERROR * (2 * max(gamma, 1.0) / len(b)) ** 0.5).sqrt()


def summed(parts: Sequence[Curvature], posterior: Posterior) -> Precision:
    """Σ_g c_g H_g + P₀ under the posterior's prior and noise."""
    first, *rest = parts
    scales = posterior.part_scales.detach()
    H = first.mixed(rest, scales) if rest else first.scaled(scales[0])
    return H.plus(detached(posterior.prior.P0))


def times(system: System, v: Float[Tensor, "m p"], products: Float[Tensor, "g m p"]) -> Float[Tensor, "m p"]:
    """P v from the products H_g v."""
    return torch.einsum("g,gmp->mp", system.scales, products) + system.P0.diagonal * v


def sizes(system: System, r: Float[Tensor, "m p"]) -> Float[Tensor, " m"]:
    """√(rᵀM⁻¹r) for each of m vectors, M the preconditioner."""
    return (r * system.preconditioner.solve(r)).sum(-1).clamp(min=0).sqrt()


def detached(P0: GroupedDiagonal) -> GroupedDiagonal:
    return GroupedDiagonal(P0.values.detach(), P0.index)
