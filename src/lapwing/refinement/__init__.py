"""Refine a posterior: Laplace at the mode of the linear model, or Gaussian variational inference."""

from lapwing.refinement.covariances import DiagonalCovariance, FullCovariance
from lapwing.refinement.curvature import reestimated_at
from lapwing.refinement.expected import averaged, can_average, sketched
from lapwing.refinement.laplace import Adam, refine_laplace
from lapwing.refinement.passes import CountedPasses
from lapwing.refinement.sampled import SampledSteps
from lapwing.refinement.variational import Ascent
from lapwing.refinement.vi import Variational, refine_variational

__all__ = [
    "Adam",
    "Ascent",
    "CountedPasses",
    "DiagonalCovariance",
    "FullCovariance",
    "SampledSteps",
    "Variational",
    "averaged",
    "can_average",
    "reestimated_at",
    "refine_laplace",
    "refine_variational",
    "sketched",
]
