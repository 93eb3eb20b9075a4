"""Predictive distributions: from a Gaussian over weights to a Gaussian over outputs, to probabilities."""

from lapwing.predictive.concatenated import concatenated
from lapwing.predictive.families import Frame, from_draws, from_gaussian
from lapwing.predictive.nonlinear import network_draws
from lapwing.predictive.prediction import (
    ClassPrediction,
    DensityPrediction,
    Prediction,
    RegressionPrediction,
    Split,
)
from lapwing.predictive.pushforward import (
    FUNCTION_PAIRS,
    SiteGaussian,
    WeightGaussian,
    antithetic_draws,
    linear_draws,
    mean_outputs,
    pushforward,
    pushforward_joint,
    pushforward_marginal,
    pushforward_sites,
    site_gaussian,
)

__all__ = [
    "FUNCTION_PAIRS",
    "ClassPrediction",
    "DensityPrediction",
    "Frame",
    "Prediction",
    "RegressionPrediction",
    "SiteGaussian",
    "Split",
    "WeightGaussian",
    "antithetic_draws",
    "concatenated",
    "from_draws",
    "from_gaussian",
    "linear_draws",
    "mean_outputs",
    "network_draws",
    "pushforward",
    "pushforward_joint",
    "pushforward_marginal",
    "pushforward_sites",
    "site_gaussian",
]
