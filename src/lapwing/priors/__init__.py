"""Gaussian priors: a mean, and one precision per group of parameters; groups found at normalisation layers."""

from lapwing.priors.gaussian import (
    GaussianPrior,
    as_prior,
    elementwise,
    isotropic,
    layerwise,
    regrouped,
    tensors_together,
    tensorwise,
)

__all__ = [
    "GaussianPrior",
    "as_prior",
    "elementwise",
    "isotropic",
    "layerwise",
    "regrouped",
    "tensors_together",
    "tensorwise",
]
