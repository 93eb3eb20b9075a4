"""The equations of the samples, P ζ = b, for all samples at once: directly, or by passes over the data.

Both objectives of sample-then-optimise have this P as their Hessian and the same minimiser:

    ½ Σ_n ‖J_n z − ε_n‖²_Λ + ½ ‖z − θ₀‖²_P₀,      ½ Σ_n ‖J_n z‖²_Λ + ½ ‖z − P₀⁻¹ b‖²_P₀.

They differ in the variance of minibatch gradients only. Antorán et al. (2023), equations 8 and 9.
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

_OF_STANDARD_ERROR, _MOST_ITERATIONS = 0.25, 200


@dataclass(frozen=True, eq=False)
class System:
    """P = Σ_g c_g H_g + P₀, and a precision near it that is cheap to solve with."""

    P0: GroupedDiagonal
    scales: Float[Tensor, " g"]
    near: Precision


@dataclass(frozen=True, eq=False)
class Start:
    """Samples for other equations; the H_g ζ, where they are known, save a pass."""

    draws: WeightDraws
    products: Float[Tensor, "g k p"] | None = None


@dataclass(frozen=True, eq=False)
class Solved:
    """Samples and how well their equations hold; `products` are the H_g ζ."""

    draws: WeightDraws
    products: Float[Tensor, "g k p"]
    residual: float  # the largest √(rᵀM⁻¹r / bᵀM⁻¹b)
    n_products: int


class Solver(ABC):
    """Samples for one prior and noise after another."""

    precise: bool  # to the last digits: the mode is worth finding so closely too

    @abstractmethod
    def parts_mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "g m p"]:
        """H_g v of each part."""

    @abstractmethod
    def near(self, posterior: Posterior) -> Precision:
        """What to precondition with under the posterior's prior and noise."""

    @abstractmethod
    def solve(self, start: Start, system: System, *, data_targets: bool) -> Solved:
        """ζ for another prior and noise, from where it was. `data_targets`: the first of the two objectives."""


@dataclass(frozen=True, eq=False)
class Direct(Solver):
    """The whole curvature in memory, as a matrix or, where there are fewer outputs than parameters, as rows.

    With rows M the equations are solved in the dual: P⁻¹ = P₀⁻¹ − P₀⁻¹Mᵀ(I + M P₀⁻¹ Mᵀ)⁻¹ M P₀⁻¹.
    """

    parts: tuple[Curvature, ...]
    precise: bool = True

    @classmethod
    def of(cls, posterior: Posterior, source: Source) -> Direct:
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
        """Of rows SᵀJ, or of the matrix of their products where they are more than the parameters."""
        each = [H.rows_of(piece.f, piece.y, piece.J) for piece in data if isinstance(piece, StoredPiece)]
        parts: list[Curvature] = []
        for g in range(n_parts):
            M = torch.cat([rows[g] for rows in each])
            parts.append(LowRankCurvature.of(DenseRows(M)) if len(M) < H.p else DenseCurvature.of(M.T @ M))
        return cls(tuple(parts), precise=False)

    def parts_mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "g m p"]:
        return torch.stack([part.mv(v) for part in self.parts])

    def near(self, posterior: Posterior) -> Precision:
        return summed(self.parts, posterior)

    def solve(self, start: Start, system: System, *, data_targets: bool) -> Solved:
        draws = start.draws
        zeta = system.near.solve(draws.pull(system.P0.diagonal, system.scales))
        found = replace(draws, zeta=zeta, precisions=system.P0.diagonal, scales=system.scales)
        return Solved(found, self.parts_mv(zeta), 0.0, 0)


@dataclass(frozen=True, eq=False)
class Streamed(Solver):
    """Every product is a pass over the data."""

    H: GaussNewton
    n_parts: int
    sketch: tuple[Curvature, ...]  # of each part, to precondition with; none: the posterior's own structure does
    precise = False

    def parts_mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "g m p"]:
        one_hot = torch.eye(self.n_parts, dtype=torch.float64, device=v.device)
        return torch.stack([self.H.mv(v, e) for e in one_hot])

    def near(self, posterior: Posterior) -> Precision:
        return summed(self.sketch, posterior) if self.sketch else posterior.precision.preconditioner()

    def _solved(self, draws: WeightDraws, system: System, zeta: Tensor, n_products: int) -> Solved:
        """With the residual as it is, not as an iteration believes it to be."""
        products = self.parts_mv(zeta)
        b = draws.pull(system.P0.diagonal, system.scales)
        residual = sizes(system, b - times(system, zeta, products)) / sizes(system, b)
        found = replace(draws, zeta=zeta, precisions=system.P0.diagonal, scales=system.scales)
        return Solved(found, products, float(residual.max()), n_products)


@dataclass(frozen=True, eq=False)
class Conjugate(Streamed):
    """Conjugate gradients for what is missing to ζ.

    Without a `cg` of the user's, they stop when (ζ − P⁻¹b)ᵀ P (ζ − P⁻¹b), which is at most rᵀM⁻¹r for a sketch M ⪯ P,
    is small against the standard error √(2γ/K) of γ: more digits of the samples would not make γ any better known.
    """

    cg: CG | None

    def solve(self, start: Start, system: System, *, data_targets: bool) -> Solved:
        draws, cg = start.draws, self.cg or CG(max_iterations=_MOST_ITERATIONS)
        b = draws.pull(system.P0.diagonal, system.scales)
        products = self.parts_mv(draws.zeta) if start.products is None else start.products
        missing = b - times(system, draws.zeta, products)
        wanted = self._bearable(draws, system, b) if self.cg is None else cg.rtol * sizes(system, b)
        # Tolerances are those of ζ as a whole, and b − P ζ is what is left to solve for.
        rtol = float((wanted / sizes(system, missing).clamp(min=1e-300)).min())
        found = conjugate_gradients(
            lambda v: self.H.mv(v, system.scales) + system.P0.diagonal * v,
            missing,
            precondition=system.near.approximate_solve,
            rtol=rtol,
            max_iterations=cg.max_iterations,
        )
        return self._solved(draws, system, draws.zeta + found.x, found.iterations)

    def _bearable(self, draws: WeightDraws, system: System, b: Float[Tensor, "k p"]) -> Float[Tensor, ""]:
        """√(rᵀM⁻¹r) that does no harm; γ is what the samples said last, or what the sketch knows of it."""
        before = draws.precisions.sqrt() * draws.zeta
        sketched = system.P0.diagonal.sqrt() * system.near.solve(b)
        gamma = max(float((draws.prior * (draws.prior - zeta)).sum()) / len(b) for zeta in (before, sketched))
        return b.new_tensor(_OF_STANDARD_ERROR * (2 * max(gamma, 1.0) / len(b)) ** 0.5).sqrt()


def summed(parts: Sequence[Curvature], posterior: Posterior) -> Precision:
    """Σ_g c_g H_g + P₀ at the posterior's prior and noise."""
    first, *rest = parts
    scales = posterior.part_scales.detach()
    H = first.mixed(rest, scales) if rest else first.scaled(scales[0])
    return H.plus(detached(posterior.prior.P0))


def times(system: System, v: Float[Tensor, "m p"], products: Float[Tensor, "g m p"]) -> Float[Tensor, "m p"]:
    """P v, from the H_g v."""
    return torch.einsum("g,gmp->mp", system.scales, products) + system.P0.diagonal * v


def sizes(system: System, r: Float[Tensor, "m p"]) -> Float[Tensor, " m"]:
    """√(rᵀM⁻¹r)."""
    return (r * system.near.solve(r)).sum(-1).clamp(min=0).sqrt()


def detached(P0: GroupedDiagonal) -> GroupedDiagonal:
    return GroupedDiagonal(P0.values.detach(), P0.index)
