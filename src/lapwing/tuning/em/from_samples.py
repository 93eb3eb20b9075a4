"""A posterior represented by its samples: predictions need products with K vectors and no linear solves."""

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
    """Samples of the weights instead of a curvature."""

    n: int

    def stored_floats(self, layout: ParamLayout) -> int:
        return self.n * layout.p

    def row_floats(self, sizes: RowSizes) -> int:
        return sizes.factored


def from_samples(posterior: Posterior) -> Posterior:
    """The posterior with covariance 1/K Σ ζ_k ζ_kᵀ, from the samples of `lw.tune(by="em")`.

    Predictions, joint covariances and function draws then come from samples under the full GGN, whatever the structure
    of the posterior. Variances have a relative error of √(2/K), and covariances have rank K.
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
