"""The exact Hessian of the loss, to diagnose the Gauss–Newton approximation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import Estimate, Full
from lapwing.data import ModelInput
from lapwing.data.targets import encoded_batches
from lapwing.errors import NumericalError, StructureError
from lapwing.operators import DenseCurvature
from lapwing.posterior import Posterior
from lapwing.runtime.sandbox import random_state_kept

_MAX_PARAMETERS = 5_000  # a Hessian of 200 MB in float64


@dataclass(frozen=True, eq=False)
class ExactHessian:
    """H = −∇²_θ κ Σ log p(y | f(x; θ)) at θ*: the Gauss–Newton matrix plus residuals times second derivatives of f.

    Away from a minimum H + P₀ can be indefinite; then there is no Laplace approximation.
    """

    posterior: Posterior
    matrix: Float[Tensor, "p p"]

    @cached_property
    def eigenvalues(self) -> Float[Tensor, " p"]:
        """Eigenvalues of H + P₀, ascending."""
        return torch.linalg.eigvalsh(self.matrix + self.posterior.prior.P0.diagonal.diag())

    @property
    def smallest_eigenvalue(self) -> float:
        return float(self.eigenvalues[0])

    @property
    def n_negative(self) -> int:
        return int((self.eigenvalues < 0).sum())

    @cached_property
    def residual_term(self) -> Float[Tensor, "p p"]:
        """H − GGN = −Σ_n Σ_c r_nc ∇²f_c, which Gauss–Newton omits (and what the structure omits)."""
        return self.matrix - self.posterior.curvature.to_dense()

    @property
    def distance(self) -> float:
        """‖H − GGN‖ / ‖GGN‖, Frobenius."""
        return float(self.residual_term.norm() / self.posterior.curvature.to_dense().norm())

    def to_posterior(self) -> Posterior:
        """A posterior with this curvature; raises if H + P₀ is not positive definite."""
        if self.smallest_eigenvalue <= 0:
            raise NumericalError(
                f"H + P₀ has {self.n_negative} negative eigenvalues, the smallest {self.smallest_eigenvalue:.4g}: the "
                "weights are not at a minimum, and the exact Hessian is no precision matrix there. Use the "
                "Gauss–Newton posterior from lw.fit, train further, or raise the prior precision."
            )
        scales = self.posterior.part_scales
        if len(scales) > 1:
            raise StructureError(
                "With one noise level per output the exact Hessian does not split into parts; share the noise."
            )
        part = DenseCurvature.of(self.matrix / scales[0].detach())
        return replace(self.posterior, estimate=Estimate((part,), self.posterior.estimate.statistics), structure=Full())


def exact_hessian(posterior: Posterior, data: Any, *, progress: bool | None = None) -> ExactHessian:
    """The Hessian of the summed loss at the posterior's weights, by P double-backward passes per batch."""
    posterior.check_unrefined("exact_hessian")
    batches = posterior.batches(data)
    posterior = posterior.covering(batches)
    p = posterior.layout.p
    if p > _MAX_PARAMETERS:
        raise StructureError(
            f"exact_hessian forms a {p} × {p} matrix by {p} double-backward passes; it is refused above "
            f"{_MAX_PARAMETERS} parameters. Choose fewer with params=[...]."
        )
    H = torch.zeros(p, p, dtype=torch.float64, device=posterior.linearised.network.device)
    with random_state_kept():
        for x, y in encoded_batches(batches, posterior.likelihood, posterior.sites, progress=progress):
            H += _of_batch(posterior, x, y)
    return ExactHessian(posterior, (H + H.T) / 2)


def _of_batch(posterior: Posterior, x: ModelInput, y: Tensor) -> Float[Tensor, "p p"]:
    """−κ ∇²_θ Σ log p of one batch (p, p), row by row with double backward."""
    layout = posterior.layout
    inferred = slice(None) if layout.selection is None else layout.selection
    # Fused attention kernels have no second derivative.
    with posterior.linearised.network.plain_attention(), posterior.linearised.graph(x) as trace:
        leaves = list(trace.leaves.values())
        loss = -posterior.likelihood_scale * posterior.likelihood.log_prob(posterior.sites.split(trace.f), y).sum()
        gradient = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        return torch.stack([_flat_gradient(g_i, leaves)[inferred] for g_i in _entries(gradient, leaves)[inferred]])


def _entries(gradient: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Tensor:
    dense = [torch.zeros_like(p) if g is None else g for g, p in zip(gradient, leaves, strict=True)]
    return torch.cat([g.reshape(-1) for g in dense])


def _flat_gradient(scalar: Tensor, leaves: Sequence[Tensor]) -> Float[Tensor, " p"]:
    """∂ scalar/∂θ (p,) in float64; zero where the graph does not reach a tensor."""
    if not scalar.requires_grad:
        return torch.cat([torch.zeros_like(p, dtype=torch.float64).reshape(-1) for p in leaves])
    second = torch.autograd.grad(scalar, leaves, retain_graph=True, allow_unused=True)
    dense = [torch.zeros_like(p) if g is None else g for g, p in zip(second, leaves, strict=True)]
    return torch.cat([g.double().reshape(-1) for g in dense])
