"""Check a likelihood's residual, Hessian and root against finite differences of its log density."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lapwing.errors import InputError, NumericalError
from lapwing.likelihoods.base import Likelihood, Sites
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian

STEP = 1e-5
TOLERANCE = 1e-6


@dataclass(frozen=True)
class LikelihoodCheck:
    """Largest errors, relative to the largest entry of the term or to one, whichever is larger."""

    n_terms: int
    residual_error: float
    root_error: float
    hessian_error: float | None  # None: Λ is an estimate or a projection, so there is no exact value


def check_likelihood(likelihood: Likelihood, f: Tensor, y: object) -> LikelihoodCheck:
    """Compare r, Λ and S with central differences (h = 1e-5) of log p in float64; raises for errors above 1e-6.

    `f` (n, ...) and `y` are outputs and targets as a model and a data set give them. Compared are r with ∇ log p,
    S Sᵀ with Λ, and Λ with −∇r; the latter is averaged over y for the heteroscedastic Gaussian.
    """
    if f.ndim == 0 or len(f) == 0:
        raise InputError(
            f"check_likelihood needs outputs f for at least one datum, (n, ...), but {tuple(f.shape)} came."
        )
    sites = Sites(tuple(f.shape[1:]), likelihood.class_axis)
    targets = likelihood.encode(y, sites, len(f))
    f = sites.split(f.detach().double())
    hessian, S = likelihood.hessian(f, targets), likelihood.hessian_root(f, targets)
    slopes = _differences(partial(likelihood.log_prob, y=targets), f)
    expected = _expected_hessian(likelihood, f, targets)
    return LikelihoodCheck(
        n_terms=f.shape[0] * f.shape[1],
        residual_error=_compare("residual", likelihood.residual(f, targets), slopes, n_axes=1),
        root_error=_compare("hessian_root, S Sᵀ against hessian,", S @ S.mT, hessian, n_axes=2),
        hessian_error=None if expected is None else _compare("hessian", hessian, expected, n_axes=2),
    )


def _expected_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor | None:
    if likelihood.canonical:
        return -_differences(partial(likelihood.residual, y=y), f)
    if isinstance(likelihood, HeteroscedasticGaussian):
        # −∇r is quadratic in y, so its mean over y ~ N(μ, σ²) equals its mean over the two points μ ± σ.
        mean, variance = likelihood.natural_to_moments(f)
        points = (mean - variance.sqrt(), mean + variance.sqrt())
        low, high = (-_differences(partial(likelihood.residual, y=at), f) for at in points)
        return (low + high) / 2
    return None


def _differences(function: Callable[[Tensor], Tensor], f: Tensor) -> Tensor:
    """∂function/∂f_c by central differences; c is the last axis of the result."""
    steps = STEP * torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    return torch.stack([(function(f + step) - function(f - step)) / (2 * STEP) for step in steps], -1)


def _compare(what: str, came: Tensor, expected: Tensor, *, n_axes: int) -> float:
    if came.shape != expected.shape:
        raise NumericalError(f"{what} has shape {tuple(came.shape)}, but {tuple(expected.shape)} was expected.")
    axes = tuple(range(-n_axes, 0))
    scale = expected.abs().amax(axes, keepdim=True).clamp_min(1.0)
    error = ((came - expected).abs() / scale).nan_to_num(nan=torch.inf)
    worst = float(error.max())
    if not worst <= TOLERANCE:
        index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise NumericalError(
            f"{what} does not match finite differences: entry {index} (datum, term, output, ...) is "
            f"{float(came[index]):.10g}, but {float(expected[index]):.10g} was expected, an error of {worst:.3g} "
            f"against a tolerance of {TOLERANCE:g}. Correct the formula, or log_prob if that is the one which is wrong."
        )
    return worst
