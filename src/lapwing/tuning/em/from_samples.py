"""A posterior whose covariance is that of its samples: every prediction costs products with K vectors, no solve."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lapwing.curvature import Structure
from lapwing.errors import InputTypeError, StructureError
from lapwing.network.jacobian import RowSizes
from lapwing.network.parameters import ParamLayout
from lapwing.operators import SampledCurvature
from lapwing.posterior import Posterior


@dataclass(frozen=True)
class Draws(Structure):
    """No curvature at all, but draws of the weights."""

    n: int

    def stored_floats(self, layout: ParamLayout) -> int:
        return self.n * layout.p

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored


def from_samples(posterior: Posterior) -> Posterior:
    """The posterior with the covariance 1/K Σ ζ_k ζ_kᵀ of the samples that `lw.tune(by="em")` left with it.

    Predictions, joint covariances and draws of functions come from the samples of the full GGN, whatever the structure
    of the posterior. Variances have a relative error of √(2/K), and covariances the rank K.
    """
    if not isinstance(posterior, Posterior):
        raise InputTypeError(f"from_samples: expected a Posterior, got {type(posterior).__name__}.")
    draws = posterior.draws
    if draws is None or posterior.refinement is not None:
        raise StructureError('from_samples: no samples are known for this posterior; they come from lw.tune(by="em").')
    same = (posterior.prior.P0.diagonal, draws.precisions), (posterior.part_scales, draws.scales)
    if not all(torch.allclose(a.detach(), b, rtol=1e-9, atol=0.0) for a, b in same):
        raise StructureError(
            "from_samples: prior or noise have changed since the samples were drawn. Sample anew: "
            'lw.tune(posterior, data, by="em").'
        )
    one = draws.scales.new_ones(())
    parts = tuple(SampledCurvature(draws.zeta, draws.precisions, c, one) for c in draws.scales)
    return replace(
        posterior,
        estimate=replace(posterior.estimate, parts=parts),
        structure=Draws(len(draws.zeta)),
        why="samples of the full GGN",
        expansion=None if posterior.expansion is None else replace(posterior.expansion, follows=False),
    )
