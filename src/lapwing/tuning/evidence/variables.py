"""Log precisions and log scale of the curvature as optimisation variables with bounds, and Newton's direction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing._types import Bool, Float, Tensor
from lapwing.posterior import Posterior
from lapwing.tuning.step import at, log_bounds, noise_of


@dataclass(frozen=True, eq=False)
class Variables:
    """An iterate: u = log δ within bounds, w = log c of each noise level, and whether w may change."""

    u: Float[Tensor, " g"]
    w: Float[Tensor, " s"]
    low: Float[Tensor, " d"]  # of (u, w)
    high: Float[Tensor, " d"]
    tune_noise: bool

    @classmethod
    def of(cls, posterior: Posterior, tune_noise: bool) -> Variables:
        u, low, high = posterior.prior.precisions.detach().log(), *log_bounds(posterior)
        w = posterior.part_scales.detach().log()  # fixed if there is no noise to tune
        if not tune_noise:
            return cls(u, w, torch.cat([low, w]), torch.cat([high, w]), tune_noise)._bounded()
        w = (posterior.likelihood_scale.detach() / noise_of(posterior) ** 2).log().to(u)  # c = κ/σ²
        least, most = _log_scale_bounds(posterior)
        return cls(u, w, torch.cat([low, least]), torch.cat([high, most]), tune_noise)._bounded()

    @property
    def z(self) -> Float[Tensor, " d"]:
        return torch.cat([self.u, self.w])

    def moved(self, move: Float[Tensor, " d"]) -> Variables:
        z = torch.minimum(torch.maximum(self.z + move, self.low), self.high)
        return replace(self, u=z[: len(self.u)], w=z[len(self.u) :])

    def free(self, gradient: Float[Tensor, " d"]) -> Bool[Tensor, " d"]:
        """Variables that may change: not fixed, and not pressed against a bound by the gradient."""
        held = ((self.z <= self.low) & (gradient < 0)) | ((self.z >= self.high) & (gradient > 0))
        held[len(self.u) :] |= not self.tune_noise
        return ~held

    def _bounded(self) -> Variables:
        return self.moved(torch.zeros_like(self.low))

    def on(self, posterior: Posterior) -> Posterior:
        """The posterior with these hyperparameters."""
        return at(posterior, self.u.exp(), self.w.exp() if self.tune_noise else None)


def ascent_direction(gradient: Tensor, hessian: Tensor, free: Tensor) -> Float[Tensor, " d"]:
    """|H|⁻¹ g: Newton's step where E is concave; with absolute eigenvalues it ascends elsewhere, away from saddles."""
    move = torch.zeros_like(gradient)
    if not bool(free.any()):
        return move
    values, V = torch.linalg.eigh(hessian[free][:, free])
    curvature = values.abs().clamp(min=1e-12 * float(values.abs().max()) + 1e-300)
    move[free] = V @ ((V.T @ gradient[free]) / curvature)
    return move.clamp(-4, 4)  # at most e⁴ in a precision: the quadratic model is local


def _log_scale_bounds(posterior: Posterior) -> tuple[Float[Tensor, 1], Float[Tensor, 1]]:
    kappa = posterior.likelihood_scale.detach()
    low, high = posterior.noise_bounds()
    return (kappa / high**2).log(), (kappa / low**2).log()
