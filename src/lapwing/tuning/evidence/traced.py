"""The evidence without closed-form derivatives: gradients by reverse mode, Hessian by finite differences of them.

For several noise levels, split damping, the empirical Fisher, or a Gaussian with fewer rows than weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.posterior import Posterior
from lapwing.tuning.evidence.target import Target
from lapwing.tuning.step import at

_DIFFERENCE = 1e-5  # step in a log; the error of the Hessian only affects the convergence of Newton's method


@dataclass(frozen=True, eq=False)
class TracedTarget(Target):
    """Evaluates the evidence of a posterior with replaced hyperparameters."""

    posterior: Posterior
    tune_noise: bool

    def value(self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]) -> Scalar:
        return at(self.posterior, u.exp(), w.exp() if self.tune_noise else None).log_evidence()

    def derivatives(
        self, u: Float[Tensor, " g"], w: Float[Tensor, " s"]
    ) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        """Gradient by reverse mode; Hessian by forward differences of it, symmetrised."""
        z, n = torch.cat([u, w]), len(u)
        gradient, H = self._gradient(z, n), z.new_zeros(len(z), len(z))
        for k, e in enumerate(torch.eye(len(z), dtype=z.dtype, device=z.device)[: None if self.tune_noise else n]):
            H[k] = (self._gradient(z + _DIFFERENCE * e, n) - gradient) / _DIFFERENCE
        return gradient, (H + H.T) / 2

    def _gradient(self, z: Float[Tensor, " d"], n: int) -> Float[Tensor, " d"]:
        with torch.enable_grad():
            leaf = z.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.value(leaf[:n], leaf[n:]), leaf, materialize_grads=True)
        return gradient.detach()
