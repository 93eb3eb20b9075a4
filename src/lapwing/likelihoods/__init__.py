"""Likelihoods in output space: log density, residual, Hessian and its root, sampling."""

from lapwing.likelihoods.base import Likelihood, Sites
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.check import LikelihoodCheck, check_likelihood
from lapwing.likelihoods.custom import CustomLikelihood
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.output_curvature import Columns, Independent, OutputCurvature, Softmax
from lapwing.likelihoods.poisson import Poisson

__all__ = [
    "Bernoulli",
    "Categorical",
    "Columns",
    "CustomLikelihood",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Independent",
    "Likelihood",
    "LikelihoodCheck",
    "OutputCurvature",
    "Poisson",
    "Sites",
    "Softmax",
    "check_likelihood",
]
