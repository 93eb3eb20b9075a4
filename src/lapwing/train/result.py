"""From an objective to a posterior: N(μ, diag σ²) as curvature plus prior."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan

import torch
from torch import nn

from lapwing import curvature
from lapwing._types import Float, Tensor
from lapwing.curvature import Estimate, Exact, FitStatistics, ModelSummary
from lapwing.data import Columns, ModelInput
from lapwing.data.targets import ragged
from lapwing.likelihoods import Gaussian, Likelihood, Sites
from lapwing.network.rule_check import linearise
from lapwing.operators import DiagonalCurvature
from lapwing.planning import Needs, choose, parse_memory
from lapwing.posterior import Posterior, Trained
from lapwing.priors import GaussianPrior
from lapwing.runtime.sandbox import plain_tensors, random_state_kept


@dataclass(frozen=True, eq=False)
class Result:
    """What an objective ends with."""

    model: nn.Module
    few: ModelInput  # inputs to linearise the network at
    likelihood: Likelihood
    log_std: Float[Tensor, " p"]
    prior: GaussianPrior
    n_data: int
    columns: Columns | None
    trained: Trained


@plain_tensors()
def posterior_of(result: Result) -> Posterior:
    """With P = 1/σ² and κ = 1/β, κ H = 1/σ² − 1/s²: at the optimum H is the Fisher information over all data.

    Where a variance is larger than the prior's the entry of H is negative; P is positive in any case.
    """
    layout, family = result.prior.layout, _settled(result.likelihood)
    with random_state_kept():
        linearised = linearise(result.model, lambda model, x: layout, result.few)
    sites = Sites(linearised.datum_shape, family.class_axis)
    if ragged(family, sites):
        linearised = replace(linearised, ragged=1 - sites.axis)
    prior = result.prior.on(linearised.network.device)
    room = choose(curvature.Diag(), Needs(ModelSummary(linearised, result.few), 1, parse_memory(None), prior.P0))
    return Posterior(
        linearised,
        family,
        _estimate(result, family, prior),
        prior,
        curvature.Diag(),
        Exact(),
        torch.tensor(1 / result.trained.beta, dtype=torch.float64),
        room.chunk_floats,
        why=f"trained by {result.trained.by}",
        columns=result.columns,
        trained=result.trained,
    )


def _estimate(result: Result, family: Likelihood, prior: GaussianPrior) -> Estimate:
    """The parts H_g with κ Σ_g c_g H_g = 1/σ² − 1/s²; all of it in the first of them."""
    precision = (-2 * result.log_std.detach().double()).exp()
    H = (precision - prior.P0.diagonal.detach()) * result.trained.beta
    scales = family.part_scales()
    first = DiagonalCurvature(H / scales[0].to(H))
    parts = (first, *(DiagonalCurvature(torch.zeros_like(H)) for _ in scales[1:]))
    gradients = torch.zeros(len(scales), len(H), dtype=torch.float64)
    return Estimate(parts, FitStatistics(result.n_data, _unknown(family), gradients))


def _unknown(family: Likelihood) -> Float[Tensor, " d"]:
    """Sums over the data that training does not keep."""
    n = 2 * len(family.part_scales()) if isinstance(family, Gaussian) else 1
    return torch.full((n,), nan, dtype=torch.float64)


def _settled(family: Likelihood) -> Likelihood:
    return family.with_noise_std(family.resolved().detach().cpu()) if isinstance(family, Gaussian) else family
