"""The evidence as a function of log precisions u_g and the log scale w of the curvature, with both derivatives.

Around a point θ₀ the evidence of the linear model is

    E(u, w) = ℓ₀(w) + c gᵀx − ½ c xᵀHx − ½ Σ δ m² − ½ log det(P P₀⁻¹),   P = c H + diag δ,

with δ = e^u, c = e^w, t = θ₀ − m₀, the mode m = θ_* − m₀ = P⁻¹ c (g + H t) and x = m − t. (The shorter
½ bᵀP⁻¹b − ½ Σ δ t² with b = c g − δ t is the same, and loses all digits where δ is large.) Where θ₀ is held, at the
trained weights or at a mode found with data, x = 0. With γ the effective dimensions, the envelope theorem gives

    ∂E/∂u_g = ½ (γ_g − δ_g ‖θ_* − m₀‖²_g),   ∂E/∂w = ½ κ n − ½ c SSE(θ_*) − ½ Σ γ_g.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import pi

import torch

from lapwing._types import Float, Int, Scalar, Tensor
from lapwing.curvature import Exact, FitStatistics, Sampled
from lapwing.likelihoods import Gaussian
from lapwing.operators import DenseCurvature, GroupedDiagonal, LowRankCurvature, MatrixFreeCurvature
from lapwing.posterior import Posterior


@dataclass(frozen=True, eq=False)
class Fit:
    """ℓ₀ as a function of w: −c SSE/2 + (κ n/2) w + constant; without noise to tune the first two are zero."""

    half_sse: Scalar
    half_count: Scalar
    constant: Scalar

    @classmethod
    def of(cls, posterior: Posterior, statistics: FitStatistics) -> Fit:
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
    """E with its gradient and Hessian in (u_1 … u_G, w)."""

    @abstractmethod
    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar: ...

    @abstractmethod
    def derivatives(self, u: Float[Tensor, " g"], w: Scalar) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]: ...


@dataclass(frozen=True, eq=False)
class HeldTarget(Target):
    """θ₀ is held, so that only the eigenvalues of H in each group count, and ‖θ₀ − m₀‖².

    With q = c λ/(c λ + δ) and t = Σ q (1 − q) the Hessian is −½ [[t_g + δ_g s_g, −t_g], [−t_g, Σ t + c·SSE]]: negative
    definite, so E is concave in the logs and has one maximum.
    """

    fit: Fit
    eigenvalues: tuple[Float[Tensor, " _"], ...]  # of H at unit dispersion, by group
    weights: tuple[Float[Tensor, " _"], ...]  # how often each counts
    scatter: Float[Tensor, " g"]

    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar:
        occam = [n @ (values * (w - u_g).exp()).log1p() for values, n, u_g in self._groups(u)]
        return self.fit.value(w) - 0.5 * ((u.exp() * self.scatter).sum() + torch.stack(occam).sum())

    def derivatives(self, u: Float[Tensor, " g"], w: Scalar) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        # q = c λ/(c λ + δ) = λ/(λ + δ/c)
        qs = [(values / (values + (u_g - w).exp()), n) for values, n, u_g in self._groups(u)]
        gamma = torch.stack([n @ q for q, n in qs])
        t = gamma - torch.stack([(n * q) @ q for q, n in qs])
        pull, misfit = u.exp() * self.scatter, 2 * self.fit.half_sse * w.exp()
        gradient_w = self.fit.half_count - 0.5 * (misfit + gamma.sum())
        gradient = torch.cat([0.5 * (gamma - pull), gradient_w[None]])
        return gradient, _bordered((-0.5 * (t + pull)).diag(), 0.5 * t, -0.5 * (t.sum() + misfit))

    def _groups(self, u: Float[Tensor, " g"]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return zip(self.eigenvalues, self.weights, u, strict=True)


@dataclass(frozen=True, eq=False)
class SpectralTarget(Target):
    """The mode follows: all terms elementwise, in coordinates that make H and P₀ diagonal together."""

    fit: Fit
    eigenvalues: Float[Tensor, " r"]  # of H at unit dispersion
    index: Int[Tensor, " r"]
    g: Float[Tensor, " r"]
    t: Float[Tensor, " r"]

    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar:
        delta, c = u.exp()[self.index], w.exp()
        occam = (self.eigenvalues * c / delta).log1p().sum()
        mode = self._mode(delta, c)
        x = mode - self.t
        fit = self.fit.value(w) + (c * self.g * x - 0.5 * c * self.eigenvalues * x**2).sum()
        return fit - 0.5 * ((delta * mode**2).sum() + occam)

    def derivatives(self, u: Float[Tensor, " g"], w: Scalar) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        delta, c = u.exp()[self.index], w.exp()
        cl = c * self.eigenvalues
        P = cl + delta
        q = cl / P  # γ is its sum; dq/du = −q (1 − q), dq/dw = q (1 − q)
        mode = self._mode(delta, c)  # dmode/du = −δ mode/P, dmode/dw = dx/dw = s/P
        x = mode - self.t  # θ_* − θ₀
        s = c * (self.g - self.eigenvalues * x)
        pull = self._sums(delta * mode**2, u)
        gradient_u = 0.5 * (self._sums(q, u) - pull)
        gradient_w = self.fit.half_count - self.fit.half_sse * c - 0.5 * q.sum() + (s * x + 0.5 * cl * x**2).sum()
        t = q * (1 - q)
        uu = -0.5 * (self._sums(t, u) + pull - self._sums(2 * delta**2 * mode**2 / P, u))
        uw = 0.5 * self._sums(t - 2 * delta * mode * s / P, u)
        # d/dw of s x + ½ c λ x² at fixed s, x is the same again; through x it is s · s/P.
        ww = -self.fit.half_sse * c - 0.5 * t.sum() + (s * x + 0.5 * cl * x**2 + s**2 / P).sum()
        return torch.cat([gradient_u, gradient_w[None]]), _bordered(uu.diag(), uw, ww)

    def _mode(self, delta: Tensor, c: Tensor) -> Float[Tensor, " r"]:
        return c * (self.g + self.eigenvalues * self.t) / (c * self.eigenvalues + delta)

    def _sums(self, v: Float[Tensor, " r"], u: Tensor) -> Float[Tensor, " g"]:
        return u.new_zeros(len(u)).index_add(0, self.index, v)


@dataclass(frozen=True, eq=False)
class DenseTarget(Target):
    """The same with P⁻¹ as a matrix, for several precisions on a full curvature."""

    fit: Fit
    H: Float[Tensor, "p p"]  # at unit dispersion
    index: Int[Tensor, " p"]
    g: Float[Tensor, " p"] | None  # None: θ₀ is held
    t: Float[Tensor, " p"]

    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar:
        delta, c = u.exp()[self.index], w.exp()
        L = self._factor(delta, c)
        occam = 2 * L.diagonal().log().sum() - u[self.index].sum()
        if self.g is None:
            return self.fit.value(w) - 0.5 * ((delta * self.t**2).sum() + occam)
        mode = torch.cholesky_solve(c * self._reached[:, None], L)[:, 0]
        x = mode - self.t
        fit = self.fit.value(w) + c * self.g @ x - 0.5 * c * x @ (self.H @ x)
        return fit - 0.5 * ((delta * mode**2).sum() + occam)

    @cached_property
    def _reached(self) -> Float[Tensor, " p"]:
        """g + H t."""
        assert self.g is not None
        return self.g + self.H @ self.t

    def derivatives(self, u: Float[Tensor, " g"], w: Scalar) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        delta, c = u.exp()[self.index], w.exp()
        cov = torch.cholesky_inverse(self._factor(delta, c))
        g = torch.zeros_like(self.t) if self.g is None else self.g
        mode = self.t if self.g is None else c * (cov @ self._reached)
        x = mode - self.t
        sizes = self._sums(torch.ones_like(delta), u)
        gamma = sizes - self._sums(delta * cov.diagonal(), u)
        pull = self._sums(delta * mode**2, u)
        cHx = c * (self.H @ x)
        gradient_w = self.fit.half_count - self.fit.half_sse * c - 0.5 * gamma.sum() + c * g @ x - 0.5 * x @ cHx
        # dγ_g/du_h = −[g=h] δ tr(Σ)_gg + δ_g δ_h ‖Σ_gh‖², dθ_*/du_h = −δ_h Σ E_h mode, dθ_*/dw = Σ (c g − c H x)
        squares = self._pairs(delta[:, None] * cov**2 * delta, u)
        moved = self._pairs((delta * mode)[:, None] * cov * (delta * mode), u) if self.g is not None else 0.0
        slope = c * g - cHx if self.g is not None else torch.zeros_like(x)
        back = cov @ slope
        uu = 0.5 * ((gamma - sizes).diag() + squares - pull.diag() + 2 * moved)
        uw = 0.5 * (sizes - gamma - squares.sum(1) - 2 * self._sums(delta * mode * back, u))
        trace = (sizes - gamma).sum() - squares.sum()  # tr Σ D − tr Σ D Σ D = dγ/dw
        ww = -self.fit.half_sse * c - 0.5 * trace + c * g @ x - 0.5 * x @ cHx + slope @ back
        return torch.cat([0.5 * (gamma - pull), gradient_w[None]]), _bordered(uu, uw, ww)

    def _factor(self, delta: Tensor, c: Tensor) -> Float[Tensor, "p p"]:
        return torch.linalg.cholesky(c * self.H + delta.diag())

    def _sums(self, v: Float[Tensor, " p"], u: Tensor) -> Float[Tensor, " g"]:
        return u.new_zeros(len(u)).index_add(0, self.index, v)

    def _pairs(self, M: Float[Tensor, "p p"], u: Tensor) -> Float[Tensor, "g g"]:
        """Σ of M over each pair of groups."""
        rows = M.new_zeros(len(u), len(M)).index_add(0, self.index, M)
        return M.new_zeros(len(u), len(u)).index_add(1, self.index, rows)


@dataclass(frozen=True, eq=False)
class DualTarget(Target):
    """θ₀ is held, and H has fewer rows M than columns: log det(P P₀⁻¹) = log det B with B = I + Σ_g (c/δ_g) K_g.

    K_g = M E_g Mᵀ is the kernel of group g. With A_g = (c/δ_g) K_g:  γ_g = tr B⁻¹A_g, and its derivatives hold
    T_gh = tr B⁻¹A_g B⁻¹A_h.
    """

    fit: Fit
    kernels: Float[Tensor, "g r r"]
    scatter: Float[Tensor, " g"]

    def value(self, u: Float[Tensor, " g"], w: Scalar) -> Scalar:
        occam = 2 * torch.linalg.cholesky(self._inner(u, w)).diagonal().log().sum()
        return self.fit.value(w) - 0.5 * ((u.exp() * self.scatter).sum() + occam)

    def derivatives(self, u: Float[Tensor, " g"], w: Scalar) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self._inner(u, w)))
        each = (w - u).exp()[:, None, None] * (inverse @ self.kernels)  # B⁻¹A_g
        gamma = each.diagonal(dim1=-2, dim2=-1).sum(-1)
        T = torch.einsum("gij,hji->gh", each, each)
        pull, misfit = u.exp() * self.scatter, 2 * self.fit.half_sse * w.exp()
        gradient_w = self.fit.half_count - 0.5 * (misfit + gamma.sum())
        uu, uw = 0.5 * (T - (gamma + pull).diag()), 0.5 * (gamma - T.sum(1))
        return torch.cat([0.5 * (gamma - pull), gradient_w[None]]), _bordered(uu, uw, -uw.sum() - 0.5 * misfit)

    def _inner(self, u: Tensor, w: Tensor) -> Float[Tensor, "r r"]:
        eye = torch.eye(self.kernels.shape[1], dtype=self.kernels.dtype, device=self.kernels.device)
        return eye + torch.einsum("g,gij->ij", (w - u).exp(), self.kernels)


def _bordered(uu: Float[Tensor, "g g"], uw: Float[Tensor, " g"], ww: Scalar) -> Float[Tensor, "d d"]:
    top = torch.cat([uu, uw[:, None]], 1)
    return torch.cat([top, torch.cat([uw, ww[None]])[None]])


MOST_DENSE = 6_000  # parameters up to which a dense P⁻¹ is formed for the derivatives
_MOST_KERNELS = 32  # groups up to which a kernel each is kept
MOST_GROUPS = 1_000  # groups up to which their Hessian is formed


def target(posterior: Posterior) -> Target | None:
    """The evidence in closed form, or None: several noise levels, damping that is not a prior, many rows, no matrix."""
    prior, part = posterior.prior, posterior.estimate.parts[0]
    known = part.adds_prior and not isinstance(part, MatrixFreeCurvature)
    simple = len(posterior.estimate.parts) == 1 and known and isinstance(posterior.fisher, Exact | Sampled)
    if not simple or prior.P0.n_groups > MOST_GROUPS:
        return None
    at = posterior.expansion
    held = at is None or not at.follows
    statistics = posterior.estimate.statistics if at is None else at.statistics
    fit = Fit.of(posterior, statistics)
    theta = posterior.linearised.theta if at is None else at.theta
    t, scatter = theta - prior.mean, prior.scatter(theta)
    if held and prior.P0.isotropic:
        values, weights = part.weighted_spectrum()
        return HeldTarget(fit, (values,), (weights,), scatter)
    return _with_axes(posterior, fit, None if held else statistics.gradients[0], t, scatter)


def _with_axes(posterior: Posterior, fit: Fit, g: Tensor | None, t: Tensor, scatter: Tensor) -> Target | None:
    part, P0 = posterior.estimate.parts[0], posterior.prior.P0
    axes = part.coordinates(P0)
    if axes is not None and g is None:
        groups = tuple(axes.eigenvalues[axes.index == i] for i in range(P0.n_groups))
        return HeldTarget(fit, groups, tuple(torch.ones_like(values) for values in groups), scatter)
    if axes is not None and g is not None:
        return SpectralTarget(fit, axes.eigenvalues, axes.index, axes.rotate(g), axes.rotate(t))
    if isinstance(part, LowRankCurvature) and g is None and not part.scale.ndim and P0.n_groups <= _MOST_KERNELS:
        one_hot = torch.eye(P0.n_groups, dtype=torch.float64, device=P0.index.device)
        kernels = [part.scale * part.root.kernel(GroupedDiagonal(e, P0.index)) for e in one_hot]
        return DualTarget(fit, torch.stack(kernels), scatter)
    if isinstance(part, DenseCurvature) and part.p <= MOST_DENSE:
        return DenseTarget(fit, part.to_dense(), P0.index, g, t)
    return None
