"""The evidence as a function of log precisions u_g and the log scale w of the curvature, with gradient and Hessian.

Around a point θ₀ the evidence of the linear model is

    E(u, w) = ℓ₀(w) + c gᵀx − ½ c xᵀHx − ½ Σ δ m² − ½ log det(P P₀⁻¹),   P = c H + diag δ,

with δ = e^u, c = e^w, t = θ₀ − m₀, the mode m = θ_* − m₀ = P⁻¹ c (g + H t) and x = m − t. (The shorter
½ bᵀP⁻¹b − ½ Σ δ t² with b = c g − δ t is equal, but cancels where δ is large.) If θ₀ is held fixed, at the trained
weights or at a mode found with data, x = 0. With γ the effective dimensions, the envelope theorem gives

    ∂E/∂u_g = ½ (γ_g − δ_g ‖θ_* − m₀‖²_g),   ∂E/∂w = ½ κ n − ½ c SSE(θ_*) − ½ Σ γ_g.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import pi

import torch

from lapwing._types import Float, Int, Scalar, Tensor
from lapwing.curvature import Exact, FitStatistics, Sampled
from lapwing.likelihoods import Gaussian
from lapwing.operators import Curvature, GroupedDiagonal, LowRankCurvature, MatrixFreeCurvature
from lapwing.posterior import Posterior
from lapwing.tuning.evidence.log_det import (
    DenseLogDet,
    KernelLogDet,
    LogDet,
    dense_log_det,
    kernel_log_det,
    log_dets,
)


@dataclass(frozen=True, eq=False)
class Fit:
    """ℓ₀ as a function of w: −c SSE/2 + (κ n/2) w + constant. Without noise to tune the first two terms are zero."""

    half_sse: Scalar
    half_count: Scalar
    constant: Scalar

    @classmethod
    def of(cls, posterior: Posterior, statistics: FitStatistics) -> Fit:
        """From the sufficient statistics of the likelihood at the point of expansion."""
        kappa = posterior.likelihood_scale.detach()
        if isinstance(posterior.likelihood, Gaussian):
            # κ ℓ(c) = −c SSE/2 + (κ n/2) log(c / 2πκ), because c = κ/σ²
            sse, count = statistics.likelihood.chunk(2)
            half_count = kappa * count[0] / 2
            return cls(sse[0] / 2, half_count, -half_count * (2 * pi * kappa).log())
        zero = torch.zeros((), dtype=torch.float64)
        return cls(zero, zero, kappa * posterior.likelihood.log_lik(statistics.likelihood).detach())

    def value(self, w: Tensor) -> Scalar:
        return self.constant - self.half_sse * w.exp() + self.half_count * w


class Target(ABC):
    """E with its gradient and Hessian in (u_1 … u_G, w). Closed forms have a single w."""

    @abstractmethod
    def value(self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]) -> Scalar: ...

    @abstractmethod
    def derivatives(
        self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]: ...


@dataclass(frozen=True, eq=False)
class FixedModeTarget(Target):
    """θ₀ is held fixed: E depends on ‖θ₀ − m₀‖² per group and the determinants.

    If every eigenvector of H lies within one group, E is concave in the logs and has one maximum.
    """

    fit: Fit
    log_dets: tuple[LogDet, ...]
    scatter: Float[Tensor, " g"]

    def value(self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]) -> Scalar:
        (w,) = w
        log_det = torch.stack([term.value(u, w) for term in self.log_dets]).sum()
        return self.fit.value(w) - 0.5 * ((u.exp() * self.scatter).sum() + log_det)

    def derivatives(
        self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        """∂E/∂u = ½ (γ − δ ‖m‖²), ∂²E/∂u² = ½ (T − diag(γ + δ ‖m‖²)), with m = θ₀ − m₀ fixed."""
        (w,) = w
        gamma, T = (torch.stack(each).sum(0) for each in zip(*(o.dimensions(u, w) for o in self.log_dets), strict=True))
        penalty, misfit = u.exp() * self.scatter, 2 * self.fit.half_sse * w.exp()
        gradient_w = self.fit.half_count - 0.5 * (misfit + gamma.sum())
        uu, uw = 0.5 * (T - (gamma + penalty).diag()), 0.5 * (gamma - T.sum(1))
        return torch.cat([0.5 * (gamma - penalty), gradient_w[None]]), _bordered(uu, uw, -uw.sum() - 0.5 * misfit)


@dataclass(frozen=True, eq=False)
class SpectralTarget(Target):
    """The mode follows the hyperparameters. Elementwise, in coordinates where H and P₀ are both diagonal."""

    fit: Fit
    eigenvalues: Float[Tensor, " r"]  # of H at unit dispersion
    index: Int[Tensor, " r"]
    g: Float[Tensor, " r"]
    t: Float[Tensor, " r"]
    weights: Float[Tensor, " r"]  # of the eigenvalues in sums over them

    def value(self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]) -> Scalar:
        (w,) = w
        delta, c = u.exp()[self.index], w.exp()
        log_det = self.weights @ (self.eigenvalues * c / delta).log1p()
        mode = self._mode(delta, c)
        x = mode - self.t
        fit = self.fit.value(w) + (c * self.g * x - 0.5 * c * self.eigenvalues * x**2).sum()
        return fit - 0.5 * ((delta * mode**2).sum() + log_det)

    def derivatives(
        self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        (w,) = w
        delta, c = u.exp()[self.index], w.exp()
        cl = c * self.eigenvalues
        P = cl + delta
        q = self.weights * cl / P  # γ is its sum; dq/du = −q δ/P, dq/dw = q δ/P
        mode = self._mode(delta, c)  # dmode/du = −δ mode/P, dmode/dw = dx/dw = s/P
        x = mode - self.t  # θ_* − θ₀
        s = c * (self.g - self.eigenvalues * x)
        penalty = self._sums(delta * mode**2, u)
        gradient_u = 0.5 * (self._sums(q, u) - penalty)
        gradient_w = self.fit.half_count - self.fit.half_sse * c - 0.5 * q.sum() + (s * x + 0.5 * cl * x**2).sum()
        t = q * delta / P
        uu = -0.5 * (self._sums(t, u) + penalty - self._sums(2 * delta**2 * mode**2 / P, u))
        uw = 0.5 * self._sums(t - 2 * delta * mode * s / P, u)
        # d/dw of s x + ½ c λ x²: the same terms again at fixed s and x, and s · s/P through x.
        ww = -self.fit.half_sse * c - 0.5 * t.sum() + (s * x + 0.5 * cl * x**2 + s**2 / P).sum()
        return torch.cat([gradient_u, gradient_w[None]]), _bordered(uu.diag(), uw, ww)

    def _mode(self, delta: Tensor, c: Tensor) -> Float[Tensor, " r"]:
        return c * (self.g + self.eigenvalues * self.t) / (c * self.eigenvalues + delta)

    def _sums(self, v: Float[Tensor, " r"], u: Tensor) -> Float[Tensor, " g"]:
        return u.new_zeros(len(u)).index_add(0, self.index, v)


@dataclass(frozen=True, eq=False)
class DenseTarget(Target):
    """The mode follows the hyperparameters, with P⁻¹ as a dense matrix: several precisions and full curvature."""

    fit: Fit
    log_det: DenseLogDet
    g: Float[Tensor, " p"]
    t: Float[Tensor, " p"]

    def value(self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]) -> Scalar:
        (w,) = w
        delta, c = u.exp()[self.log_det.index], w.exp()
        L = self.log_det.factor(u, w)
        mode = torch.cholesky_solve(c * self._shifted_gradient[:, None], L)[:, 0]
        x = mode - self.t
        fit = self.fit.value(w) + c * self.g @ x - 0.5 * c * x @ (self.log_det.H @ x)
        return fit - 0.5 * ((delta * mode**2).sum() + self.log_det.logdet(L, u))

    @cached_property
    def _shifted_gradient(self) -> Float[Tensor, " p"]:
        """g + H t."""
        return self.g + self.log_det.H @ self.t

    def derivatives(
        self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        (w,) = w
        delta, c = u.exp()[self.log_det.index], w.exp()
        cov = torch.cholesky_inverse(self.log_det.factor(u, w))
        gamma, T = self.log_det.dimensions_of(cov, u, w)
        mode = c * (cov @ self._shifted_gradient)
        x = mode - self.t
        penalty = self.log_det.sums(delta * mode**2, u)
        cHx = c * (self.log_det.H @ x)
        gradient_w = self.fit.half_count - self.fit.half_sse * c - 0.5 * gamma.sum() + c * self.g @ x - 0.5 * x @ cHx
        # dθ_*/du_h = −δ_h Σ E_h mode, dθ_*/dw = Σ (c g − c H x)
        moved = self.log_det.pairs((delta * mode)[:, None] * cov * (delta * mode), u)
        slope = c * self.g - cHx
        back = cov @ slope
        uu = 0.5 * (T - (gamma + penalty).diag() + 2 * moved)
        uw = 0.5 * (gamma - T.sum(1) - 2 * self.log_det.sums(delta * mode * back, u))
        trace = gamma.sum() - T.sum()  # dγ/dw
        ww = -self.fit.half_sse * c - 0.5 * trace + c * self.g @ x - 0.5 * x @ cHx + slope @ back
        return torch.cat([0.5 * (gamma - penalty), gradient_w[None]]), _bordered(uu, uw, ww)


@dataclass(frozen=True, eq=False)
class KernelTarget(Target):
    """The mode follows the hyperparameters, in function space: H = MᵀM with few rows, B = I + c M D⁻¹ Mᵀ = L Lᵀ.

    P⁻¹v = D⁻¹v − c D⁻¹Mᵀ B⁻¹ M D⁻¹v (Woodbury); otherwise as `DenseTarget`.
    """

    fit: Fit
    log_det: KernelLogDet
    H: LowRankCurvature
    index: Int[Tensor, " p"]
    g: Float[Tensor, " p"]
    t: Float[Tensor, " p"]

    def value(self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]) -> Scalar:
        (w,) = w
        L, delta, c = self.log_det.factor(u, w), u.exp()[self.index], w.exp()
        mode = self._solve(L, delta, c, c * self._shifted_gradient[None])[0]
        x = mode - self.t
        fit = self.fit.value(w) + c * self.g @ x - 0.5 * c * x @ self.H.mv(x)
        return fit - 0.5 * ((delta * mode**2).sum() + 2 * L.diagonal().log().sum())

    def derivatives(
        self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        (w,) = w
        L, delta, c = self.log_det.factor(u, w), u.exp()[self.index], w.exp()
        gamma, T = self.log_det.dimensions_of(L, u, w)
        mode = self._solve(L, delta, c, c * self._shifted_gradient[None])[0]
        x = mode - self.t
        penalty = torch.zeros_like(u).index_add(0, self.index, delta * mode**2)
        cHx = c * self.H.mv(x)
        slope = c * self.g - cHx
        # dθ_*/du_h = −Σ E_h δ mode, dθ_*/dw = Σ slope
        mode_gradients = (delta * mode) * (self.index == torch.arange(len(u), device=u.device)[:, None])
        moved = self._solve(L, delta, c, torch.cat([mode_gradients, slope[None]]))
        rise = c * self.g @ x - 0.5 * x @ cHx
        gradient_w = self.fit.half_count - self.fit.half_sse * c - 0.5 * gamma.sum() + rise
        uu = 0.5 * (T - (gamma + penalty).diag() + 2 * mode_gradients @ moved[:-1].T)
        uw = 0.5 * (gamma - T.sum(1) - 2 * mode_gradients @ moved[-1])
        ww = -self.fit.half_sse * c - 0.5 * (gamma.sum() - T.sum()) + rise + slope @ moved[-1]
        return torch.cat([0.5 * (gamma - penalty), gradient_w[None]]), _bordered(uu, uw, ww)

    @cached_property
    def _shifted_gradient(self) -> Float[Tensor, " p"]:
        """g + H t."""
        return self.g + self.H.mv(self.t)

    def _solve(self, L: Tensor, delta: Tensor, c: Tensor, v: Float[Tensor, "m p"]) -> Float[Tensor, "m p"]:
        half, v = self.H.scale.sqrt(), v / delta
        inner = torch.cholesky_solve((half * self.H.root.push(v)).T, L).T
        return v - c * self.H.root.pull(half * inner) / delta


def _bordered(uu: Float[Tensor, "g g"], uw: Float[Tensor, " g"], ww: Scalar) -> Float[Tensor, "d d"]:
    """The symmetric matrix [[uu, uw], [uwᵀ, ww]]."""

    top = torch.cat([uu, uw[:, None]], 1)
    return torch.cat([top, torch.cat([uw, ww[None]])[None]])


_MOST_GROUPS = 1_000  # groups up to which their Hessian is formed


def target(posterior: Posterior, *, estimates: bool = False) -> Target | None:
    """The evidence in closed form. None for several noise levels, split damping, many rows, or without a matrix.

    With `estimates`, expensive entries of the Hessian are stochastic estimates; values and gradients never are.
    """
    prior, part = posterior.prior, posterior.estimate.parts[0]
    known = part.exact_prior and not isinstance(part, MatrixFreeCurvature)
    simple = len(posterior.estimate.parts) == 1 and known and isinstance(posterior.fisher, Exact | Sampled)
    if not simple or prior.P0.n_groups > _MOST_GROUPS:
        return None
    at = posterior.expansion
    statistics = posterior.estimate.statistics if at is None else at.statistics
    fit = Fit.of(posterior, statistics)
    theta = posterior.linearised.theta if at is None else at.theta
    if at is not None and at.follows:
        return _following_target(part, prior.P0, fit, statistics.gradients[0], theta - prior.mean, estimates)
    terms = log_dets(part, prior.P0, estimates=estimates)
    return None if terms is None else FixedModeTarget(fit, terms, prior.scatter(theta))


def _following_target(
    part: Curvature, P0: GroupedDiagonal, fit: Fit, g: Tensor, t: Tensor, estimates: bool
) -> Target | None:
    """The target in the cheapest form that the structure allows; None if there is none."""
    axes = part.coordinates(P0)
    if axes is not None:
        return SpectralTarget(fit, axes.eigenvalues, axes.index, axes.rotate(g), axes.rotate(t), axes.weights)
    if isinstance(part, LowRankCurvature):
        kernels = kernel_log_det(part, P0, estimates=estimates)
        return None if kernels is None else KernelTarget(fit, kernels, part, P0.index, g, t)
    dense = dense_log_det(part, P0)
    return None if dense is None else DenseTarget(fit, dense, g, t)
