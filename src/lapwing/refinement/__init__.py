"""Better Gaussians for the linear model: at its own mode, or variational."""

from lapwing.refinement.curvature import curved_at
from lapwing.refinement.laplace import Adam, refine_laplace
from lapwing.refinement.passes import Passes

__all__ = ["Adam", "Passes", "curved_at", "refine_laplace"]
