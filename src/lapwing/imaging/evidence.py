"""The evidence of the linear model of an image, and its maximisation over the prior and the noise.

    F(η) = ½ log det K + ½ r_mᵀ r_m/σ² + ½ θ_mᵀ S_θ⁻¹ θ_m  (+ TV-PredCP),   K = A J S_θ Jᵀ Aᵀ + σ² I

At the linear model's own mode θ_m = S_θ Jᵀ Aᵀ K⁻¹ y_o, with y_o = y − A (x̂ − J θ̂), the last two terms are
½ y_oᵀ K⁻¹ y_o, and −F − (m/2) log 2π is its log evidence. At any other weights θ_m with the residual r_m of their image
F is an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log, pi
from typing import Any

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import NumericalError
from lapwing.imaging.predcp import VariationPrior
from lapwing.imaging.prior import ImagePrior

_NOISE_BOUNDS = 1e-10, 1e1  # of σ², relative to the mean square of the data
_SCALES = torch.logspace(-8, 6, 57, dtype=torch.float64)
_LEVELS = torch.logspace(-8, 0, 33, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Evidence:
    """F and its gradient, at one Cholesky factorisation each."""

    prior: ImagePrior
    grams: Float[Tensor, "k m m"]  # A G_k Aᵀ
    target: Float[Tensor, " m"]  # y_o
    inserted: tuple[Float[Tensor, " m"], tuple[Tensor, ...]] | None = None  # r_m, scatters of θ_m; None: the mode
    variation: VariationPrior | None = None

    @property
    def m(self) -> int:
        return len(self.target)

    def loss(self, eta: Float[Tensor, " q"], log_noise: Scalar) -> Scalar:
        """F, TV-PredCP included."""
        value = self.plain(eta, log_noise)
        return value if self.variation is None else value + self.variation(self.prior.settings(eta))

    def plain(self, eta: Float[Tensor, " q"], log_noise: Scalar) -> Scalar:
        """F without it."""
        K = self.covariance(eta, log_noise)
        log_det, quad = _LogDetAndQuad.apply(K, self.target)
        if self.inserted is None:
            return 0.5 * log_det + 0.5 * quad
        residual, scatters = self.inserted
        fit = residual.square().sum() / log_noise.exp()
        return 0.5 * log_det + 0.5 * fit + 0.5 * self.prior.quadratic(eta, scatters)

    def log_evidence(self, eta: Float[Tensor, " q"], log_noise: Scalar) -> Scalar:
        return -self.plain(eta, log_noise) - 0.5 * self.m * log(2 * pi)

    def covariance(self, eta: Float[Tensor, " q"], log_noise: Scalar) -> Float[Tensor, "m m"]:
        """K."""
        K = self.prior.coefficients(eta) @ self.grams.flatten(1)
        K[:: self.m + 1].add_(log_noise.exp())  # the diagonal, in place: a copy would take as long as the sum
        return K.reshape(self.m, self.m)

    @property
    def noise_bounds(self) -> tuple[float, float]:
        size = max(float(self.target.square().mean()), 1e-300)
        return log(_NOISE_BOUNDS[0] * size), log(_NOISE_BOUNDS[1] * size)

    def start(self, length: float) -> Float[Tensor, " q1"]:
        """(η, log σ²) of one common variance and one length scale, the best on a grid; one eigendecomposition."""
        eta = self.prior.start(1.0, length)
        K = (self.prior.coefficients(eta) @ self.grams.flatten(1)).reshape(self.m, self.m)
        values, U = torch.linalg.eigh(0.5 * (K + K.T))
        projected, size = (U.T @ self.target).square(), self.target.square().mean().clamp(min=1e-300)
        unit = values.clamp(min=0) / values[-1].clamp(min=1e-300)
        spectrum = _SCALES[:, None, None] * size * unit + (_LEVELS * size)[None, :, None]
        scores = spectrum.log().sum(-1) + (projected / spectrum).sum(-1)
        best = int(scores.argmin())
        scale = _SCALES[best // len(_LEVELS)] * size / values[-1].clamp(min=1e-300)
        low, high = self.prior.bounds
        eta = self.prior.start(float(scale), length).clamp(low, high)
        return torch.cat([eta, (_LEVELS[best % len(_LEVELS)] * size).log().reshape(1)])


class _LogDetAndQuad(torch.autograd.Function):
    """log det K and yᵀK⁻¹y, with the gradients K⁻¹ and −K⁻¹y yᵀK⁻¹."""

    @staticmethod
    def forward(ctx: Any, K: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        L, info = torch.linalg.cholesky_ex(K)
        if int(info):
            raise NumericalError(
                f"imaging: the covariance of the data is not positive definite ({len(K)} measurements, leading minor "
                f"{int(info)}): the noise is too small for double precision."
            )
        alpha = torch.cholesky_solve(y[:, None], L)[:, 0]
        ctx.save_for_backward(L, alpha)
        return 2 * L.diagonal().log().sum(), y @ alpha

    @staticmethod
    def backward(ctx: Any, g_log_det: Tensor, g_quad: Tensor) -> tuple[Tensor, None]:
        L, alpha = ctx.saved_tensors
        return g_log_det * torch.cholesky_inverse(L) - g_quad * torch.outer(alpha, alpha), None


@dataclass(frozen=True, eq=False)
class Found:
    """Hyperparameters at an optimum, the path there, and what is odd about them."""

    eta: Float[Tensor, " q"]
    log_noise: Scalar
    loss: float
    history: tuple[float, ...]
    at_bound: tuple[str, ...] = ()
    not_monotone: tuple[str, ...] = ()

    @property
    def noise_var(self) -> float:
        return float(self.log_noise.exp())


def maximise(
    evidence: Evidence,
    *,
    noise_var: float | None = None,
    eta: Float[Tensor, " q"] | None = None,
    max_iterations: int = 200,
) -> Found:
    """L-BFGS from a short and from a long length scale; the better optimum.

    `noise_var`, `eta`: σ² or the hyperparameters where they are known, and held.
    """
    lengths = (0.1, 1.0) if eta is None and any(b.has_length for b in evidence.prior.blocks) else (1.0,)
    starts = [evidence.start(length) for length in lengths]
    runs = [_climbed(evidence, start, noise_var, eta, max_iterations) for start in starts]
    best = min(runs, key=lambda run: run.loss)
    odd = () if evidence.variation is None else evidence.variation.not_monotone(evidence.prior.settings(best.eta))
    return replace(best, at_bound=_at_bound(evidence, best), not_monotone=odd)


def _climbed(
    evidence: Evidence, start: Tensor, noise_var: float | None, eta: Tensor | None, max_iterations: int
) -> Found:
    low, high = evidence.prior.bounds if eta is None else (eta, eta)
    least, most = evidence.noise_bounds
    at = start.clone().requires_grad_()
    best: list[Any] = [inf, start]
    history: list[float] = []
    optimiser = torch.optim.LBFGS(
        [at], max_iter=max_iterations, history_size=20, tolerance_grad=1e-7, tolerance_change=1e-11,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        log_noise = x[-1].clamp(least, most) if noise_var is None else torch.tensor(noise_var, dtype=x.dtype).log()
        return torch.maximum(torch.minimum(x[:-1], high), low), log_noise

    def closure() -> Tensor:
        optimiser.zero_grad()
        try:
            loss = evidence.loss(*split(at))
        except NumericalError:  # the line search went where K cannot be factorised: a slope back to the best
            if not history:
                raise
            loss = best[0] + 1.0 + (at - best[1]).square().sum()
            loss.backward()
            return loss
        loss.backward()
        history.append(float(loss.detach()))
        if history[-1] < best[0]:
            best[:] = [history[-1], at.detach().clone()]
        return loss

    with torch.enable_grad():
        optimiser.step(closure)
    return Found(*split(best[1]), best[0], tuple(history))


def _at_bound(evidence: Evidence, found: Found) -> tuple[str, ...]:
    low, high = evidence.prior.bounds
    near = (found.eta <= low + 1e-3) | (found.eta >= high - 1e-3)
    least, most = evidence.noise_bounds
    noise = ["noise"] if not least + 1e-3 < float(found.log_noise) < most - 1e-3 else []
    return tuple(name for name, hit in zip(evidence.prior.names, near.tolist(), strict=True) if hit) + tuple(noise)
