"""Posteriors that are trained, not fitted afterwards: objectives for anybody's loop, and thin loops around them."""

from lapwing.posterior import Run
from lapwing.train.activations import smooth
from lapwing.train.loops import map, mean_field, variational_laplace
from lapwing.train.marginal_likelihood import marglik
from lapwing.train.mean_field import MeanField
from lapwing.train.variational_laplace import VariationalLaplace

__all__ = ["MeanField", "Run", "VariationalLaplace", "map", "marglik", "mean_field", "smooth", "variational_laplace"]
