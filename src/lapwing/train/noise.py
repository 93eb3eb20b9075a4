"""The noise of a Gaussian likelihood as a parameter: learned with the weights where it was left to be estimated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lapwing._types import Tensor
from lapwing.api import words
from lapwing.errors import InputError
from lapwing.likelihoods import Gaussian, Likelihood

_LEAST = 1e-3  # of a starting noise, relative to the spread of the targets


def learned_noise(likelihood: Any, like: Tensor) -> nn.Parameter | None:
    """log s, where a Gaussian's noise is to be estimated; known before any data: a word says as much."""
    if isinstance(likelihood, str) and words.canonical("likelihood", likelihood) == "regression":
        likelihood = Gaussian()
    if not isinstance(likelihood, Gaussian) or not likelihood.estimated:
        return None
    if likelihood.noise_std is not None:
        start = likelihood.resolved().log()
    elif likelihood.per_output:
        raise InputError(
            "Gaussian(per_output=True) does not say how many outputs there are, and the parameters of training are "
            "made before any data are seen. Give values to start from: Gaussian([1.0] * n_outputs, estimated=True)."
        )
    else:
        start = torch.zeros(1)
    return nn.Parameter(start.detach().to(like.device, like.dtype))


def starting_noise(likelihood: Any) -> bool:
    """Whether the noise has no value yet, and starts from the first batch."""
    return not (isinstance(likelihood, Gaussian) and likelihood.noise_std is not None)


@torch.no_grad()
def start_from(log_noise: Tensor, f: Tensor, y: Tensor) -> None:
    """At the root mean squared residual of the first batch, from which the network has yet to learn."""
    squares, spread = (y.double() - f.double()).square().mean(), y.double().square().mean()
    rms = torch.maximum(squares, _LEAST**2 * spread).sqrt()
    if bool(torch.isfinite(rms)) and float(rms) > 0:
        log_noise.copy_(rms.log().to(log_noise).expand_as(log_noise))


def at_noise(family: Likelihood, log_noise: Tensor | None) -> Likelihood:
    """The likelihood at the learned noise, in whose graph it is."""
    if log_noise is None or not isinstance(family, Gaussian):
        return family
    return family.with_noise_std(log_noise.double().exp())
