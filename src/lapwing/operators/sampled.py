"""A covariance known by draws alone: Σ ≈ 1/K Σ_k ζ_k ζ_kᵀ, of rank K. The mean is known, so it is K, not K − 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import StructureError
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.grouped_diagonal import GroupedDiagonal


def _refuse(what: str) -> NoReturn:
    raise StructureError(
        f"{what}: a posterior of samples knows draws of the weights only. Ask the posterior it was made from, "
        "lw.tune's own result."
    )


@dataclass(frozen=True, eq=False)
class SampledCurvature(Curvature):
    """What is left of H when only draws ζ ~ N(0, (c H + P₀)⁻¹) are known: one P₀, and one scale c."""

    zeta: Float[Tensor, "k p"]
    precisions: Float[Tensor, " p"]  # of the P₀ they were drawn with
    own_scale: Scalar  # at which they were drawn
    scale: Scalar

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.zeta.shape[1]

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        _refuse("H v")

    def diagonal(self) -> Float[Tensor, " p"]:
        _refuse("diag H")

    def spectrum(self) -> Float[Tensor, " r"]:
        _refuse("Eigenvalues of H")

    def scaled(self, c: Scalar) -> SampledCurvature:
        return replace(self, scale=c * self.scale)

    def mixed(self, others: Sequence[SampledCurvature], scales: Float[Tensor, " g"]) -> SampledCurvature:
        for part, c in zip((self, *others), scales, strict=True):
            part.scaled(c).check_scale()
        return self.scaled(scales[0])

    def plus(self, P0: GroupedDiagonal) -> SampledPrecision:
        self.check_scale()
        if not torch.allclose(P0.diagonal.detach(), self.precisions, rtol=1e-9, atol=0.0):
            _refuse("Another prior")
        return SampledPrecision(self.zeta)

    def check_scale(self) -> None:
        if not torch.allclose(self.scale.detach(), self.own_scale, rtol=1e-9, atol=0.0):
            _refuse("Another noise or likelihood scale")

    def to_dense(self) -> Float[Tensor, "p p"]:
        _refuse("H as a matrix")


@dataclass(frozen=True, eq=False)
class SampledPrecision(Precision):
    """Moments of draws; what needs the precision itself is refused."""

    zeta: Float[Tensor, "k p"]

    @property
    def p(self) -> int:  # type: ignore[override]
        return self.zeta.shape[1]

    def mv(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        _refuse("P v")

    def solve(self, v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """Σ v."""
        return (v @ self.zeta.T) @ self.zeta / len(self.zeta)

    def half_solve(self, eps: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """Σ_k ε_k ζ_k / √K."""
        root = self._root
        return eps[..., : len(root)] @ root

    def draws(self, n: int, *, generator: torch.Generator, device: torch.device) -> Float[Tensor, "n p"]:
        """The samples themselves as far as they go, then mixtures of them with the same covariance."""
        if n <= len(self.zeta):
            return self.zeta[:n].clone()
        shape = (n - len(self.zeta), len(self.zeta))
        eps = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).to(device)
        return torch.cat([self.zeta, eps @ self.zeta / len(self.zeta) ** 0.5])

    @cached_property
    def _root(self) -> Float[Tensor, "r p"]:
        """Rows Rᵀ with R Rᵀ = Σ, at most P of them."""
        rows = self.zeta / len(self.zeta) ** 0.5
        return rows if len(rows) <= self.p else torch.linalg.qr(rows).R

    def inv_quad(self, J: Rows) -> Float[Tensor, "n c c"]:
        q = J.mv(self.zeta).double()
        return torch.einsum("knc,knd->ncd", q, q) / len(q)

    def inv_quad_diagonal(self, J: Rows) -> Float[Tensor, "n c"]:
        return J.mv(self.zeta).double().square().mean(0)

    def inv_gram(self, J: Rows) -> Float[Tensor, "nc nc"]:
        q = J.mv(self.zeta).double().flatten(1)
        return q.T @ q / len(q)

    def inv_diagonal(self) -> Float[Tensor, " p"]:
        return self.zeta.square().mean(0)

    def logdet(self) -> Scalar:
        _refuse("log det P")

    def to_dense(self) -> Float[Tensor, "p p"]:
        _refuse("P as a matrix")
