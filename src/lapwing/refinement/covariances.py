"""The Gaussians a variational posterior may be: P = Jᵀ Λ̃ J + P₀ with every entry, or its diagonal alone.

Λ̃ (one C × C matrix per likelihood term) is all there is to a precision; at the optimum it is E_q[Λ].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.curvature import Diag, Full, Structure
from lapwing.errors import StructureError
from lapwing.likelihoods import Categorical
from lapwing.linalg import add_gram_, mirror_
from lapwing.operators import (
    DenseCurvature,
    DensePrecision,
    DiagonalCurvature,
    LowRankCurvature,
    LowRankPrecision,
    Precision,
)
from lapwing.refinement.model import LinearModel, as_rows

_MOST_SOLVED = 6_000  # weights or outputs, whichever are fewer, of systems that are solved by factorisation
_MOST_PRODUCTS, _SOLVED_TO = 200, 1e-6


class Covariance(ABC):
    """Which entries of P are kept."""

    structure: Structure

    @abstractmethod
    def check(self, model: LinearModel) -> None:
        """Refuse what is too large, in words."""

    @abstractmethod
    def precision(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Precision: ...

    @abstractmethod
    def log_det_ratio(self, precision: Precision, model: LinearModel) -> Scalar:
        """log det P − log det P₀."""

    @abstractmethod
    def step(
        self, model: LinearModel, curvature: Float[Tensor, "m c c"], precision: Precision, g: Float[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        """(Jᵀ Λ̃ J + P₀)⁻¹ g: where the mean goes. The whole matrix, whichever entries the covariance keeps."""


@dataclass(frozen=True)
class FullCovariance(Covariance):
    """Every entry, through the rows SᵀJ where they are fewer than the weights."""

    structure = Full()

    def check(self, model: LinearModel) -> None:
        if _smaller_side(model) > _MOST_SOLVED:
            raise StructureError(
                f'refine(by="vi") factorises a matrix in every step, of {model.p} weights or {model.n_outputs} '
                f'outputs, whichever are fewer; it is refused above {_MOST_SOLVED:,}. Use by="vi_diag" or by="laplace",'
                " or fewer weights: params=... in lw.fit."
            )

    def precision(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Precision:
        return whole_precision(model, root_of(model, curvature))

    def log_det_ratio(self, precision: Precision, model: LinearModel) -> Scalar:
        assert isinstance(precision, DensePrecision | LowRankPrecision)
        whole = 2 * precision.factor.diagonal().log().sum()
        return whole if isinstance(precision, LowRankPrecision) else whole - model.prior.P0.logdet()

    def step(
        self, model: LinearModel, curvature: Float[Tensor, "m c c"], precision: Precision, g: Float[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        return precision.solve(g)


@dataclass(frozen=True)
class DiagonalCovariance(Covariance):
    """The diagonal of P. Nothing of size P × P is formed where both sides are large."""

    structure = Diag()

    def check(self, model: LinearModel) -> None:
        pass

    def precision(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Precision:
        S, entries = root_of(model, curvature), torch.zeros(model.p, dtype=torch.float64, device=model.J.device)
        for some in model.pieces():
            entries += (model.turned(S, some) ** 2).sum(0)
        return DiagonalCurvature(entries).plus(model.prior.P0)

    def log_det_ratio(self, precision: Precision, model: LinearModel) -> Scalar:
        return precision.logdet() - model.prior.P0.logdet()

    def step(
        self, model: LinearModel, curvature: Float[Tensor, "m c c"], precision: Precision, g: Float[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        if _smaller_side(model) <= _MOST_SOLVED // 4:
            return whole_precision(model, root_of(model, curvature)).solve(g)
        return _conjugate_gradients(model, curvature, precision, g)


def whole_precision(model: LinearModel, S: Float[Tensor, "m c k"]) -> Precision:
    """Jᵀ S Sᵀ J + P₀."""
    m, _, k = S.shape
    if m * k < model.p:
        return LowRankCurvature.of(as_rows(S.mT @ model.J)).plus(model.prior.P0)
    H = torch.zeros(model.p, model.p, dtype=torch.float64, device=model.J.device)
    for some in model.pieces():
        add_gram_(H, model.turned(S, some))
    return DenseCurvature.of(mirror_(H)).plus(model.prior.P0)


def root_of(model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Float[Tensor, "m c k"]:
    """S with S Sᵀ = Λ̃, from its eigenvectors; those of a softmax have one eigenvalue of zero, which is left out."""
    values, U = torch.linalg.eigh(curvature)
    S = U * values.clamp(min=0).sqrt()[..., None, :]  # rounding below zero counts as zero
    return S[..., 1:] if isinstance(model.likelihood, Categorical) else S


def term_covariances(model: LinearModel, precision: Precision) -> Float[Tensor, "m c c"]:
    """V = J P⁻¹ Jᵀ of every term."""
    return torch.cat([precision.inv_quad(as_rows(model.J[some])) for some in model.pieces()])


def _smaller_side(model: LinearModel) -> int:
    return min(model.p, model.n_outputs)


def _conjugate_gradients(
    model: LinearModel, curvature: Float[Tensor, "m c c"], preconditioner: Precision, g: Float[Tensor, " p"]
) -> Float[Tensor, " p"]:
    """(Jᵀ Λ̃ J + P₀)⁻¹ g by products alone."""
    x, r = torch.zeros_like(g), g
    p = z = preconditioner.solve(r)
    rz = float(r @ z)
    target = _SOLVED_TO**2 * rz
    for _ in range(_MOST_PRODUCTS):
        if rz <= target:
            break
        Ap = model.pulled(torch.einsum("mcd,md->mc", curvature, model.pushed(p))) + model.prior.P0.diagonal * p
        alpha = rz / float(p @ Ap)
        x, r = x + alpha * p, r - alpha * Ap
        z = preconditioner.solve(r)
        rz, before = float(r @ z), rz
        p = z + rz / before * p
    return x
