"""A posterior covariance represented by samples: Σ ≈ 1/K Σ_k ζ_k ζ_kᵀ, of rank K.

The samples are deviations from a known mean, so the sum is divided by K and not by K − 1.
"""

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
        f"{what} is not available: a posterior of samples has draws of the weights only. Use the posterior that it was "
        "made from, the result of lw.tune."
    )


@dataclass(frozen=True, eq=False)
class SampledCurvature(Curvature):
    """Draws ζ ~ N(0, (c H + P₀)⁻¹) in place of H; valid for the P₀ and the scale c they were drawn with only."""

    zeta: Float[Tensor, "k p"]
    precisions: Float[Tensor, " p"]  # diagonal of the P₀ of the draws
    own_scale: Scalar  # scale c of the draws
    scale: Scalar  # current scale

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
    """Sample moments of the draws. Methods that need P itself raise a StructureError."""

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
        """Σ_k ε_k ζ_k / √K: the first entries of ε, as many as the root has rows."""
        root = self._root
        return eps[..., : len(root)] @ root

    def draws(self, n: int, *, generator: torch.Generator, device: torch.device) -> Float[Tensor, "n p"]:
        """The samples themselves; beyond K of them, random linear combinations with the same covariance."""
        if n <= len(self.zeta):
            return self.zeta[:n].clone()
        shape = (n - len(self.zeta), len(self.zeta))
        eps = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).to(device)
        return torch.cat([self.zeta, eps @ self.zeta / len(self.zeta) ** 0.5])

    @cached_property
    def _root(self) -> Float[Tensor, "r p"]:
        """Rᵀ (r, P) with R Rᵀ = Σ and r ≤ P: callers pass ε of length P, so more rows are reduced by QR."""
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
