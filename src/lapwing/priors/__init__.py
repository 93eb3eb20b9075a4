"""Gaussian priors over the parameters: a mean and one precision per group; groups due to normalisation layers."""

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
