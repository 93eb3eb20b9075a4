"""Posteriors that are trained, not fitted afterwards: objectives for anybody's loop, and thin loops around them."""

from lapwing.train.activations import smooth
from lapwing.train.mean_field import MeanField
from lapwing.train.variational_laplace import VariationalLaplace

__all__ = ["MeanField", "VariationalLaplace", "smooth"]
