"""The covariances of a variational posterior: P = Jᵀ Λ̃ J + P₀ in full, or its diagonal.

Λ̃ (one C × C matrix per likelihood term) parametrises a precision completely; at the optimum Λ̃ = E_q[Λ].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.curvature import Diag, Full, Structure
from lapwing.errors import NumericalError, StructureError
from lapwing.likelihoods import Categorical
from lapwing.linalg import add_gram_, conjugate_gradients, mirror_
from lapwing.operators import (
    DenseCurvature,
    DensePrecision,
    DiagonalCurvature,
    DiagonalPrecision,
    LowRankCurvature,
    Precision,
)
from lapwing.refinement.model import IN_CACHE, LinearModel, as_rows

_MOST_SOLVED = 8_000  # weights or outputs, whichever are fewer, largest side of a system that is factorised
_MOST_PRODUCTS, _SOLVED_TO = 200, 1e-6  # of conjugate gradients for larger systems


class Factor(ABC):
    """A factorised precision P."""

    @abstractmethod
    def solve(self, v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """P⁻¹ v."""

    @abstractmethod
    def log_det_ratio(self) -> Scalar:
        """log det P − log det P₀, which the KL divergence needs."""

    @abstractmethod
    def term_covariances(self) -> Float[Tensor, "m c c"]:
        """V = J P⁻¹ Jᵀ (m, c, c) within every likelihood term."""


@dataclass(frozen=True, eq=False)
class WeightFactor(Factor):
    """P in weight space, factorised by its operator."""

    model: LinearModel
    precision: DensePrecision | DiagonalPrecision

    def solve(self, v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        return self.precision.solve(v)

    def log_det_ratio(self) -> Scalar:
        P = self.precision  # use its Cholesky factor: `logdet` could compute an eigendecomposition instead
        whole = 2 * P.factor.diagonal().log().sum() if isinstance(P, DensePrecision) else P.logdet()
        return whole - self.model.prior.P0.logdet()

    def term_covariances(self) -> Float[Tensor, "m c c"]:
        model = self.model
        return torch.cat([self.precision.inv_quad(as_rows(model.J[some])) for some in model.pieces()])


@dataclass(frozen=True, eq=False)
class FunctionFactor(Factor):
    """P in function space: B = I + Sᵀ K S with the kernel K = J P₀⁻¹ Jᵀ, which is computed once and serves every S.

    P⁻¹ = D − D Jᵀ S B⁻¹ Sᵀ J D with D = P₀⁻¹, log det P P₀⁻¹ = log det B, V = K − K S B⁻¹ Sᵀ K.
    """

    model: LinearModel
    S: Float[Tensor, "m c k"]

    @cached_property
    def _KS(self) -> Float[Tensor, "mc mk"]:
        m, c, k = self.S.shape
        K = self.model.kernel
        return torch.einsum("amc,mck->amk", K.reshape(m * c, m, c), self.S).reshape(m * c, m * k)

    @cached_property
    def _L(self) -> Float[Tensor, "mk mk"]:
        """Cholesky factor of B = I + Sᵀ K S (mk, mk)."""
        m, c, k = self.S.shape
        B = torch.einsum("mck,mcb->mkb", self.S, self._KS.reshape(m, c, m * k)).reshape(m * k, m * k)
        # The eigenvalues of B are at least 1, so this fails only if the kernel itself is lost in rounding.
        L, info = torch.linalg.cholesky_ex(B + torch.eye(m * k, dtype=B.dtype, device=B.device))
        if int(info):
            raise NumericalError(
                f"The prior's covariance of the outputs reaches {float(self.model.kernel.abs().max()):.3g}: what the "
                "data say is lost in its rounding. Use a larger prior precision."
            )
        return L

    def dual_solve(self, v: Float[Tensor, "m c"]) -> Float[Tensor, "m c"]:
        """S B⁻¹ Sᵀ v."""
        inner = torch.einsum("mck,mc->mk", self.S, v).reshape(-1, 1)
        inner = torch.cholesky_solve(inner, self._L).reshape(len(self.S), -1)
        return torch.einsum("mck,mk->mc", self.S, inner)

    def solve(self, v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        model, u = self.model, v / self.model.prior.P0.diagonal
        return u - model.vjp(self.dual_solve(model.jvp(u))) / model.prior.P0.diagonal

    def log_det_ratio(self) -> Scalar:
        return 2 * self._L.diagonal().log().sum()

    def term_covariances(self) -> Float[Tensor, "m c c"]:
        m, c, _ = self.S.shape
        W = torch.linalg.solve_triangular(self._L, self._KS.T, upper=False).reshape(-1, m, c)
        K = torch.einsum("mcmd->mcd", self.model.kernel.reshape(m, c, m, c))
        return K - torch.einsum("rmc,rmd->mcd", W, W)


class Covariance(ABC):
    """Which entries of P are kept."""

    structure: Structure

    @abstractmethod
    def check(self, model: LinearModel) -> None:
        """Raise if the problem is too large."""

    @abstractmethod
    def precision(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Precision:
        """Jᵀ Λ̃ J + P₀, or its diagonal, as an operator that can sample weights."""

    @abstractmethod
    def factor(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Factor: ...

    @abstractmethod
    def step(
        self, model: LinearModel, curvature: Float[Tensor, "m c c"], factor: Factor, g: Float[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        """(Jᵀ Λ̃ J + P₀)⁻¹ g, the direction of the mean.

        Uses the full matrix, also where only its diagonal is kept.
        """


@dataclass(frozen=True)
class FullCovariance(Covariance):
    """Every entry of P; in function space if there are fewer outputs than weights."""

    structure = Full()

    def check(self, model: LinearModel) -> None:
        if _smaller_side(model) > _MOST_SOLVED:
            raise StructureError(
                f'refine(by="vi") factorises a matrix in every step, of {model.p} weights or {model.n_outputs} '
                f'outputs, whichever are fewer; it is refused above {_MOST_SOLVED:,}. Use by="vi_diag" or by="laplace",'
                " or fewer weights: params=... in lw.fit."
            )

    def precision(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Precision:
        S = root_of(model, curvature)
        if model.n_outputs < model.p:
            return LowRankCurvature.of(as_rows(S.mT @ model.J)).plus(model.prior.P0)
        return dense_precision(model, S)

    def factor(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Factor:
        S = root_of(model, curvature)
        if model.n_outputs < model.p:
            return FunctionFactor(model, S)
        return WeightFactor(model, dense_precision(model, S))

    def step(
        self, model: LinearModel, curvature: Float[Tensor, "m c c"], factor: Factor, g: Float[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        return factor.solve(g)


@dataclass(frozen=True)
class DiagonalCovariance(Covariance):
    """The diagonal of P. No P × P matrix is formed if both weights and outputs are many."""

    structure = Diag()

    def check(self, model: LinearModel) -> None:
        pass

    def precision(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> DiagonalPrecision:
        S, entries = root_of(model, curvature), torch.zeros(model.p, dtype=torch.float64, device=model.J.device)
        for some in model.pieces(IN_CACHE):
            entries += model.root_rows(S, some).square_().sum(0)
        return DiagonalCurvature(entries).plus(model.prior.P0)

    def factor(self, model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Factor:
        return WeightFactor(model, self.precision(model, curvature))

    def step(
        self, model: LinearModel, curvature: Float[Tensor, "m c c"], factor: Factor, g: Float[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        if _smaller_side(model) <= _MOST_SOLVED // 4:
            return FullCovariance().factor(model, curvature).solve(g)
        return _by_products(model, curvature, factor, g)


def dense_precision(model: LinearModel, S: Float[Tensor, "m c k"]) -> DensePrecision:
    """Jᵀ S Sᵀ J + P₀."""
    H = torch.zeros(model.p, model.p, dtype=torch.float64, device=model.J.device)
    for some in model.pieces():
        add_gram_(H, model.root_rows(S, some))
    return DenseCurvature.of(mirror_(H)).plus(model.prior.P0)


def root_of(model: LinearModel, curvature: Float[Tensor, "m c c"]) -> Float[Tensor, "m c k"]:
    """S with S Sᵀ = Λ̃, by eigendecomposition. A softmax has one zero eigenvalue, which is dropped."""
    values, U = torch.linalg.eigh(curvature)
    S = U * values.clamp(min=0).sqrt()[..., None, :]  # negative values are rounding errors
    return S[..., 1:] if isinstance(model.likelihood, Categorical) else S


def _smaller_side(model: LinearModel) -> int:
    return min(model.p, model.n_outputs)


def _by_products(
    model: LinearModel, curvature: Float[Tensor, "m c c"], preconditioner: Factor, g: Float[Tensor, " p"]
) -> Float[Tensor, " p"]:
    """(Jᵀ Λ̃ J + P₀)⁻¹ g by conjugate gradients, to a few digits: any ascent direction will do."""

    def product(v: Float[Tensor, "1 p"]) -> Float[Tensor, "1 p"]:
        Lambda_Jv = torch.einsum("mcd,md->mc", curvature, model.jvp(v[0]))
        return (model.vjp(Lambda_Jv) + model.prior.P0.diagonal * v[0])[None]

    found = conjugate_gradients(
        product,
        g[None],
        precondition=lambda r: preconditioner.solve(r[0])[None],
        rtol=_SOLVED_TO,
        max_iterations=_MOST_PRODUCTS,
    )
    return found.x[0]
