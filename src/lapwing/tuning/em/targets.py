"""Choose the objective of sample-then-optimise whose minibatch gradients have less variance.

At the minimum, with S_n = J_n P⁻¹ J_nᵀ, the gradient of one datum has second moment

    targets in the data:   tr J_nᵀ Λ_n (Λ_n⁻¹ − S_n) Λ_n J_n,      targets in the prior:   tr J_nᵀ Λ_n S_n Λ_n J_n.

The second is E‖J_nᵀ Λ_n J_n ζ‖², which samples estimate. Their sum is tr J_nᵀ Λ_n J_n.
"""

from __future__ import annotations

import torch

from lapwing._types import Float, Tensor
from lapwing.curvature import GaussNewton
from lapwing.network.products import DataPiece
from lapwing.posterior.sampling import WeightDraws
from lapwing.runtime import distributed

_FEW = 16  # data and samples used for the estimate


def target_share(H: GaussNewton, draws: WeightDraws, scales: Float[Tensor, " g"]) -> float:
    """Share of the objective with targets in the data in the sum of both moments; below ½ it has less variance."""
    J, zeta = H.jacobian, draws.zeta[:_FEW]
    x, y = distributed.first_item(J.source)
    n = min(x.n, _FEW)
    with J.linearised.trace(x.rows(slice(0, n))) as trace:
        piece = DataPiece(trace, y[:n], J.jvp, J.vjp)
        noise = H.drawn(piece, len(zeta), scales, torch.Generator().manual_seed(draws.seed))
        weighted = H.weighted(piece, trace.jacobian().mv(zeta).double(), scales)
        ones = torch.ones(H.p, dtype=torch.float64, device=zeta.device)
        whole, in_prior = (float(trace.rows(u.movedim(0, -1)).quad_diagonal(ones).sum()) for u in (noise, weighted))
    return min(1.0, max(0.0, 1 - in_prior / whole)) if whole > 0 else 0.5
