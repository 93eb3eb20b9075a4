"""Matrix-free curvature: only products H v are available, each of which is a pass over the data.

Solves use preconditioned conjugate gradients, draws solve for random right-hand sides, and log determinants and traces
are estimated with random probes. The preconditioner M = N + P₀ is another structure N of the same curvature, such as
KFAC. It also reduces the variance of the estimates, which are made of the difference between P and M only:

    log det P = log det M + tr log(M^-½ P M^-½),      tr f(A) = E εᵀ f(A) ε
    tr (P⁻¹ E_g) = tr (M⁻¹ E_g) + E [w ∘ (x − w)]_g,   z = M w ~ N(0, M),  w = M^-½ ε,  x = P⁻¹ z

Preconditioned Lanczos quadrature as in Gardner et al. (2018).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import StructureError
from lapwing.linalg import CG, Estimated, Probes, Solution, inverse_root, leading_eigenpairs
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.block_diagonal import BlockDiagonalCurvature
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.kronecker import EigenCurvature, KroneckerCurvature

_FLOATS_AT_ONCE = 1 << 25  # entries of each work array of a solve: 256 MiB
_MOST_REMEMBERED = 4  # cached estimates: tuning evaluates value and gradient at the same hyperparameters


class MatrixProducts(ABC):
    """Products with Σ_g c_g H_g for positive semi-definite parts H_g (one per noise scale of the likelihood)."""

    p: int
    n_parts: int
    device: torch.device

    @abstractmethod
    def mv(self, v: Float[Tensor, "m p"], scales: Float[Tensor, " g"]) -> Float[Tensor, "m p"]: ...

    @abstractmethod
    def draws(self, n: int, scales: Float[Tensor, " g"], generator: torch.Generator) -> Float[Tensor, "n p"]:
        """n draws from N(0, Σ_g c_g H_g)."""

    @abstractmethod
    def diagonals(self) -> Float[Tensor, "g p"]:
        """diag H_g of each part."""


@dataclass(frozen=True, eq=False)
class MatrixFreeCurvature(Curvature):
    """Σ_k c_k H_k over the parts of all sources; `scales` holds c, source by source."""

    sources: tuple[MatrixProducts, ...]
    scales: Float[Tensor, " k"]
    near: Curvature  # an approximation of H with cheap solves, for the preconditioner
    solver: CG
    probes: Probes
    remembered: list[tuple[Tensor, Tensor, Tensor, LogDet]] = field(default_factory=list)  # cache of recent estimates

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.sources[0].p

    @property
    def precise(self) -> bool:  # type: ignore[override]
        return self.probes.complete

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return _Product.apply(v.reshape(-1, self.p), self.scales, self).reshape(v.shape)

    def diagonal(self) -> Float[Tensor, " p"]:
        return self.scales @ torch.cat([source.diagonals() for source in self.sources])

    def spectrum(self) -> Float[Tensor, " r"]:
        raise StructureError(
            f"The {self.p} eigenvalues of a matrix-free curvature are not known; only products with it are. Use "
            'structure="lowrank" for the leading ones, or "full" for all.'
        )

    def norm(self) -> Scalar:
        generator = torch.Generator().manual_seed(0)  # fixed, so that repeated calls return the same norm
        start = torch.randn(2, self.p, generator=generator, dtype=torch.float64).to(self.sources[0].device)
        with torch.no_grad():
            return leading_eigenpairs(self.mv, start, 1, rtol=0.02, max_rounds=20).values[0]

    def scaled(self, c: Scalar) -> MatrixFreeCurvature:
        return replace(self, scales=c * self.scales, near=self.near.scaled(c.detach()))

    def mixed(self, others: Sequence[MatrixFreeCurvature], scales: Float[Tensor, " g"]) -> MatrixFreeCurvature:
        near = self.near.mixed([H.near for H in others], scales.detach())
        return self._summed(others, scales, near)

    def joined(self, others: Sequence[MatrixFreeCurvature]) -> MatrixFreeCurvature:
        near = self.near.joined([H.near for H in others])
        return self._summed(others, self.scales.new_ones(1 + len(others)), near)

    def _summed(
        self, others: Sequence[MatrixFreeCurvature], scales: Float[Tensor, " g"], near: Curvature
    ) -> MatrixFreeCurvature:
        parts = (self, *others)
        # Parts may share a source (parts of one likelihood): merge their scales, so that it costs a single pass.
        sources = tuple(dict.fromkeys(source for H in parts for source in H.sources))
        each = [c * H._scales_of(source) for source in sources for c, H in zip(scales, parts, strict=True)]
        by_source = [torch.stack(each[i : i + len(parts)]).sum(0) for i in range(0, len(each), len(parts))]
        return replace(self, sources=sources, scales=torch.cat(by_source), near=near, remembered=[])

    def plus(self, P0: GroupedDiagonal) -> MatrixFreePrecision:
        return MatrixFreePrecision(self, P0)

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.mv(torch.eye(self.p, dtype=torch.float64, device=self.sources[0].device))

    def parts_mv(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "k m p"]:
        """H_k v of each part."""
        each = [
            source.mv(v, e)
            for source in self.sources
            for e in torch.eye(source.n_parts, dtype=torch.float64, device=source.device)
        ]
        return torch.stack(each)

    def products(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m p"]:
        """H v without an autograd graph."""
        total = torch.zeros_like(v)
        for source, scales in zip(self.sources, self._by_source(self.scales.detach()), strict=True):
            total += source.mv(v, scales)
        return total

    def draws(self, n: int, generator: torch.Generator) -> Float[Tensor, "n p"]:
        """n draws from N(0, H)."""
        parts = zip(self.sources, self._by_source(self.scales.detach()), strict=True)
        return torch.stack([source.draws(n, scales, generator) for source, scales in parts]).sum(0)

    def _by_source(self, scales: Float[Tensor, " k"]) -> tuple[Tensor, ...]:
        return scales.split([source.n_parts for source in self.sources])

    def _scales_of(self, source: MatrixProducts) -> Float[Tensor, " g"]:
        for mine, scales in zip(self.sources, self._by_source(self.scales), strict=True):
            if mine is source:
                return scales
        return self.scales.new_zeros(source.n_parts)


@dataclass(frozen=True, eq=False)
class LogDet:
    """Estimates of log det P and diag P⁻¹ from the same probes."""

    value: Estimated
    inv_diagonal: Float[Tensor, " p"]
    pairs: tuple[Float[Tensor, "m p"], Float[Tensor, "m p"]] | None  # w and x, kept if there are several scales


@dataclass(frozen=True, eq=False)
class MatrixFreePrecision(Precision):
    """P = H + P₀ from products only; every method is iterative, accurate to the tolerance of the solver."""

    H: MatrixFreeCurvature
    P0: GroupedDiagonal

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.H.p

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return self.H.mv(v) + self.P0.diagonal * v

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        return _Solve.apply(v.reshape(-1, self.p), self.P0.values, self.H.scales, self).reshape(v.shape)

    def preconditioner(self) -> Precision:
        return self._near

    @cached_property
    def _near(self) -> Precision:
        """The preconditioner M, without gradients: derivatives of the solves are computed in `_Solve.backward`."""
        return self.H.near.plus(blockwise_prior(self.H.near, self.P0))

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """P₀^-½ (I + P₀^-½ H P₀^-½)^-½ ε, by Lanczos. `draws` needs no matrix square root and is cheaper."""
        half = self.P0.diagonal.detach().rsqrt()

        def whitened(v: Float[Tensor, "m p"]) -> Float[Tensor, "m p"]:
            return v + half * self.H.products(half * v)

        roots = [
            inverse_root(whitened, some, rtol=self.H.solver.rtol, max_steps=self.H.solver.max_iterations).values
            for some in self._pieces(eps.reshape(-1, self.p))
        ]
        return (half * torch.cat(roots)).reshape(eps.shape)

    def draws(self, n: int, *, generator: torch.Generator, device: torch.device) -> Float[Tensor, "n p"]:
        """P⁻¹ b with b ~ N(0, P), b = P₀^½ ε + a draw from N(0, H): one solve per draw."""
        eps = torch.randn(n, self.p, generator=generator, dtype=torch.float64, device=generator.device)
        b = self.P0.diagonal.detach().sqrt() * eps.to(device)
        with torch.no_grad():
            b += self.H.draws(n, generator)
            return self.solve(b)  # Cov[P⁻¹b] = P⁻¹ P P⁻¹ = P⁻¹

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        rows = J.dense().double()
        return rows @ self.solve(rows).mT

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        rows = J.dense().double()
        return (rows * self.solve(rows)).sum(-1)

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        rows = J.dense().double().reshape(-1, self.p)
        K = rows @ self.solve(rows).T
        return 0.5 * (K + K.T)  # iterative solves are symmetric up to the solver's tolerance only

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        """diag P⁻¹. With random probes it is an estimate, clamped to the exact bounds 1/P_ii ≤ (P⁻¹)_ii ≤ 1/δ_i."""
        found = self.estimate.inv_diagonal
        if self.H.probes.complete:
            return found
        delta = self.P0.diagonal.detach()
        return torch.minimum(torch.maximum(found, 1 / (self.H.diagonal().detach() + delta)), 1 / delta)

    def logdet(self) -> Scalar:
        return _LogDet.apply(self.P0.values, self.H.scales, self)

    def logdet_error(self) -> float:
        return self.estimate.value.std_error

    def to_dense(self) -> Float[Tensor, "p p"]:
        return self.H.to_dense() + self.P0.diagonal.diag()

    # --- iterations ------------------------------------------------------------------------------------------

    def products(self, v: Float[Tensor, "m p"]) -> Float[Tensor, "m p"]:
        return self.H.products(v) + self.P0.diagonal.detach() * v

    def solutions(self, b: Float[Tensor, "m p"]) -> Iterator[Solution]:
        """P⁻¹ b, as many right-hand sides at a time as fit into memory."""
        for some in self._pieces(b):
            yield self.H.solver(self.products, some, self._near.solve)

    def _pieces(self, v: Float[Tensor, "m p"]) -> tuple[Tensor, ...]:
        return v.split(max(1, _FLOATS_AT_ONCE // self.p))

    @property
    def estimate(self) -> LogDet:
        """Probe estimates for this P; the curvature caches those of the last few P."""
        key = self.H.scales.detach(), self.P0.values.detach(), self.P0.index
        for *known, found in self.H.remembered:
            if all(_same(a, b) for a, b in zip(known, key, strict=True)):
                return found
        with torch.no_grad():
            found = self._estimated()
        self.H.remembered[:] = [*self.H.remembered[1 - _MOST_REMEMBERED :], (*key, found)]
        return found

    def _estimated(self) -> LogDet:
        n, M = self.H.probes.count(self.p), self._near
        # The equations of the module docstring: log det P, and diag P⁻¹ = diag M⁻¹ + E w ∘ (x − w).
        values, correction, kept = [], torch.zeros(self.p, dtype=torch.float64, device=self.P0.index.device), []
        step = max(1, _FLOATS_AT_ONCE // self.p)
        for start in range(0, n, step):
            eps = self.H.probes.some(self.p, slice(start, start + step)).to(self.P0.index.device)
            w = M.half_solve(eps)
            found = self.H.solver(self.products, M.mv(w), M.solve)
            # CG on z = M w yields the Lanczos matrix of M^-½ P M^-½ started at ε, and ‖ε‖² = p.
            values += [self.p * _log_quadrature(found, i) for i in range(len(eps))]
            correction += (w * (found.x - w)).sum(0) / n
            if len(self.H.scales) > 1:
                kept.append((w, found.x))
        each = torch.stack(values)
        exact = float(M.logdet())
        value = Estimated(exact + float(each.mean()), 0.0, n) if self.H.probes.complete else Estimated.of(each, exact)
        pairs = (torch.cat([w for w, _ in kept]), torch.cat([x for _, x in kept])) if kept else None
        return LogDet(value, M.inv_diagonal() + correction, pairs)

    def scale_traces(self) -> Float[Tensor, " k"]:
        """tr(P⁻¹ H_k) of each part, rescaled so that Σ c_k tr(P⁻¹ H_k) = P − Σ δ_g tr(P⁻¹)_gg holds.

        The right-hand side has a smaller variance than the estimates of the single traces.
        """
        found, scales = self.estimate, self.H.scales.detach()
        total = self.p - (self.P0.diagonal.detach() * found.inv_diagonal).sum()
        if found.pairs is None:
            return total / scales
        w, x = found.pairs
        each = torch.einsum("mp,kmp->k", w, self.H.parts_mv(x)) / len(w)
        return each * total / (scales @ each)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: tuning optimises log precisions, so values pass through log and exp."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=0.0)


def blockwise_prior(near: Curvature, P0: GroupedDiagonal) -> GroupedDiagonal:
    """P₀ with a single precision on each Kronecker block, the geometric mean: those blocks support no other prior.

    Good enough for a preconditioner, which affects convergence only.
    """
    values, index = [P0.values.detach()], P0.index.clone()
    blocks = zip(near.slices, near.blocks, strict=True) if isinstance(near, BlockDiagonalCurvature) else ()
    for s, block in blocks:
        if isinstance(block, KroneckerCurvature | EigenCurvature) and P0.constant_on(s) is None:
            index[s] = sum(len(v) for v in values)
            values.append(P0.diagonal[s].detach().log().mean().exp()[None])
    return GroupedDiagonal(torch.cat(values), index)


def _log_quadrature(found: Solution, i: int) -> Scalar:
    """e₁ᵀ log(T) e₁ for the Lanczos matrix T of probe i."""
    diagonal, off = found.tridiagonal(i)
    if not len(diagonal):
        return found.x.new_zeros(())  # converged without an iteration: M = P, and log I = 0
    nodes, Y = torch.linalg.eigh(diagonal.diag() + off.diag(1) + off.diag(-1))
    return Y[0] ** 2 @ nodes.log()


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # only under create_graph=True
        raise StructureError(
            "Answers of a matrix-free posterior have first derivatives in prior and noise, but no second ones. For the "
            "value alone (of an effective dimension, say) call it under torch.no_grad() or detach the prior."
        )


class _Product(torch.autograd.Function):
    """H v, differentiable in v and the scales: ∂/∂c_k = H_k v."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, scales: Tensor, H: MatrixFreeCurvature) -> Tensor:
        ctx.H = H
        ctx.save_for_backward(v)
        return H.products(v.double())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        (v,) = ctx.saved_tensors
        for_v = ctx.H.products(g) if ctx.needs_input_grad[0] else None
        for_scales = torch.einsum("mp,kmp->k", g, ctx.H.parts_mv(v)) if ctx.needs_input_grad[1] else None
        return for_v, for_scales, None


class _Solve(torch.autograd.Function):
    """x = P⁻¹ v. The derivative is another solve: dx = P⁻¹ (dv − dP x)."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, values: Tensor, scales: Tensor, P: MatrixFreePrecision) -> Tensor:
        x = torch.cat([found.x for found in P.solutions(v.double())])
        ctx.P = P
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        (x,) = ctx.saved_tensors
        y = torch.cat([found.x for found in ctx.P.solutions(g)])
        for_values = -ctx.P.P0.group_sums((y * x).sum(0)) if ctx.needs_input_grad[1] else None
        for_scales = -torch.einsum("mp,kmp->k", y, ctx.P.H.parts_mv(x)) if ctx.needs_input_grad[2] else None
        return y, for_values, for_scales, None


class _LogDet(torch.autograd.Function):
    """log det P with ∂/∂δ_g = tr(P⁻¹)_gg and ∂/∂c_k = tr(P⁻¹ H_k), estimated with the same probes as the value."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, scales: Tensor, P: MatrixFreePrecision) -> Tensor:
        ctx.P = P
        return torch.tensor(P.estimate.value.value, dtype=torch.float64, device=values.device)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        P = ctx.P
        for_values = g * P.P0.group_sums(P.estimate.inv_diagonal) if ctx.needs_input_grad[0] else None
        for_scales = g * P.scale_traces() if ctx.needs_input_grad[1] else None
        return for_values, for_scales, None
