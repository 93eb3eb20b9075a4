"""Better Gaussians for the linear model: at its own mode, or variational."""

from lapwing.refinement.covariances import DiagonalCovariance, FullCovariance
from lapwing.refinement.curvature import curved_at
from lapwing.refinement.expected import averaged, can_average, sketched
from lapwing.refinement.laplace import Adam, refine_laplace
from lapwing.refinement.passes import Passes
from lapwing.refinement.sampled import SampledSteps
from lapwing.refinement.variational import Ascent
from lapwing.refinement.vi import Variational, refine_variational

__all__ = [
    "Adam",
    "Ascent",
    "DiagonalCovariance",
    "FullCovariance",
    "Passes",
    "SampledSteps",
    "Variational",
    "averaged",
    "can_average",
    "curved_at",
    "refine_laplace",
    "refine_variational",
    "sketched",
]
