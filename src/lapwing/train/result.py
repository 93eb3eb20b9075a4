"""From an objective to a posterior: N(μ, diag σ²) as curvature plus prior."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING

import torch

from lapwing import curvature
from lapwing._types import Float, Tensor
from lapwing.curvature import Estimate, Exact, FitStatistics
from lapwing.data import Batches
from lapwing.data.targets import ragged
from lapwing.likelihoods import Gaussian, Likelihood, Sites
from lapwing.network.rule_check import linearise
from lapwing.operators import DiagonalCurvature
from lapwing.planning import Needs, Survey, choose, parse_memory
from lapwing.posterior import Posterior, Trained
from lapwing.runtime.sandbox import plain_tensors, random_state_kept
from lapwing.train.noise import at_noise

if TYPE_CHECKING:
    from lapwing.train.objective import Objective


@plain_tensors()
def posterior_of(objective: Objective, data: Batches | None) -> Posterior:
    """With P = 1/σ² and κ = 1/β, κ H = 1/σ² − 1/s²: at the optimum H is the Fisher information over all data.

    Where a variance is larger than the prior's the entry of H is negative; P is positive in any case.
    """
    if data is not None:
        objective.look_at(data.first_of_all()[0])
    look, few = objective.seen()
    with random_state_kept():
        linearised = linearise(objective.model, lambda model, x: objective.layout, few)
        bound = None if data is None else objective.bound(data)
    sites = Sites(linearised.datum_shape, look.family.class_axis)
    if ragged(look.family, sites):
        linearised = replace(linearised, ragged=1 - sites.axis)
    family = _settled(at_noise(look.family, objective.log_noise))
    prior = objective.prior.on(linearised.network.device)
    room = choose(curvature.Diag(), Needs(Survey(linearised, few), 1, parse_memory(None), prior.P0))
    reverted, unmoved = objective.moved()
    return Posterior(
        linearised,
        family,
        _estimate(objective, family),
        prior,
        curvature.Diag(),
        Exact(),
        torch.tensor(1 / objective.beta, dtype=torch.float64),
        room.chunk_floats,
        why=f"trained by {objective.by}",
        columns=objective.columns,
        trained=Trained(
            objective.by, objective.beta, objective.predictive, objective.n_predicted, reverted, unmoved, bound
        ),
    )


def _estimate(objective: Objective, family: Likelihood) -> Estimate:
    """The parts H_g with κ Σ_g c_g H_g = 1/σ² − 1/s²; all of it in the first of them."""
    precision = (-2 * objective.log_std.detach().double()).exp()
    H = (precision - objective.prior.P0.diagonal.detach().to(precision)) * objective.beta
    scales = family.part_scales()
    first = DiagonalCurvature(H / scales[0].to(H))
    parts = (first, *(DiagonalCurvature(torch.zeros_like(H)) for _ in scales[1:]))
    statistics = FitStatistics(
        objective.n_data, _unknown(family), torch.zeros(len(scales), len(H), dtype=torch.float64)
    )
    return Estimate(parts, statistics)


def _unknown(family: Likelihood) -> Float[Tensor, " d"]:
    """Sums over the data that training does not keep."""
    n = 2 * len(family.part_scales()) if isinstance(family, Gaussian) else 1
    return torch.full((n,), nan, dtype=torch.float64)


def _settled(family: Likelihood) -> Likelihood:
    return family.with_noise_std(family.resolved().detach().cpu()) if isinstance(family, Gaussian) else family
