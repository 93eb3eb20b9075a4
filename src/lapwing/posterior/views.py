"""Results of `outputs`, `joint_outputs` and `functions`: Gaussians over outputs, and draws of functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lapwing import predictive
from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.posterior.fitted import Fitted
from lapwing.runtime.sandbox import plain_tensors


class JointOutputs(NamedTuple):
    """A Gaussian across inputs and outputs, flattened with the datum as the slow axis."""

    mean: Float[Tensor, " nk"]
    cov: Float[Tensor, "nk nk"]


@dataclass(frozen=True, eq=False, repr=False)
class Outputs:
    """The Gaussian over the network's outputs at some inputs; `mean`, `var` and `cov` are computed on first access."""

    posterior: Fitted
    x: ModelInput

    @cached_property
    @plain_tensors()
    def mean(self) -> Tensor:
        return self.posterior.shaped(predictive.mean_outputs(self.posterior.weights, self.x))

    @cached_property
    @plain_tensors()
    def var(self) -> Tensor:
        return self.posterior.shaped(predictive.pushforward_marginal(self.posterior.weights, self.x))

    @cached_property
    @plain_tensors()
    def cov(self) -> Float[Tensor, "n k k"]:
        return predictive.pushforward(self.posterior.weights, self.x)[1].to(self.posterior.dtype)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.mean, self.cov, self.var))

    def __repr__(self) -> str:
        shape = (self.x.n, *self.posterior.linearised.datum_shape)
        return f"Outputs: mean and var {shape}, cov {(self.x.n, *2 * (self.posterior.linearised.k,))}"


@dataclass(frozen=True, eq=False, repr=False)
class FunctionDraws:
    """Draws of the linearised function: the same functions for all calls and inputs."""

    posterior: Fitted
    deviations: Float[Tensor, "s ..."]  # (s, P), or (s, C, P) if every output has its own weights

    @plain_tensors()
    def __call__(self, x: Any) -> Tensor:
        """Outputs (n_draws, B, …)."""
        given = self.posterior.given(x)
        posterior = self.posterior.at(given)
        draws = predictive.linear_draws(posterior.weights, given, self.deviations)
        return torch.stack([posterior.shaped(f) for f in draws])

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.posterior.linearised.datum_shape))
        return (
            f"FunctionDraws: {len(self.deviations)} functions; call them on x for ({len(self.deviations)}, B, {shape})"
        )
