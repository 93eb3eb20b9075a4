"""Compute the findings of `diagnose()` from a posterior."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lapwing.data import Batches, ModelInput
from lapwing.data.targets import encode_batch
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.operators import (
    BlockDiagonalCurvature,
    DenseCurvature,
    DiagonalCurvature,
    KroneckerCurvature,
    LeadingEigen,
    LowRankCurvature,
)
from lapwing.posterior.diagnosis import Finding
from lapwing.posterior.fitted import Fitted
from lapwing.posterior.predicting import predicted
from lapwing.predictive.link_rules import DEFAULT
from lapwing.runtime import distributed
from lapwing.runtime.sandbox import random_state_kept

_MOST_CHECKED = 64  # training data whose predictions are checked


def findings(posterior: Fitted) -> Iterator[Finding]:
    """All findings, in the order in which they are computed."""
    layout, prior = posterior.layout, posterior.prior
    bends = posterior.curvature.diagonal()
    yield from Finding.of_selection(layout.selected_by, int((bends == 0).sum()), layout.p)
    if not layout.p:  # a subnetwork without weights
        return
    if posterior.trained is not None:
        yield from Finding.of_training(posterior.trained)
        yield Finding.of_structure(posterior.structure.described, posterior.why)
        return
    if posterior.untuned:
        yield Finding.of_untuned()
    yield from _gradient_findings(posterior)
    if posterior.refinement is not None:
        yield Finding.of_refinement(posterior.refinement)
    elif posterior.readout.shift is not None:
        by_held_out = bool(posterior.history) and posterior.history[-1].scale is not None
        distance, norm = posterior.readout.shift.norm(), posterior.linearised.theta.norm()
        yield Finding.of_moved_mean(float(distance), float(norm), by_held_out)
    yield from _mode_findings(posterior)
    validated = _validated(posterior)
    yield from Finding.of_average(posterior.estimate.in_expectation, validated)
    yield Finding.of_effective_dimension(dimension_by_layer(posterior))
    seen = None if posterior.source is None or not posterior.history else posterior.source.first_on_rank()
    if seen is not None:
        yield Finding.of_training_check(*training_check(posterior, *seen), validated)
    yield from Finding.of_found_groups(prior.group_names, prior.reasons)
    low, high = float(prior.precisions.min()), float(prior.precisions.max())
    # An upper bound of the condition number of H + P₀: (‖H‖ + max δ) / min δ.
    yield Finding.of_condition((float(posterior.curvature.norm()) + high) / low)
    yield from Finding.of_groups(prior.group_names, prior.precisions.detach(), *posterior.precision_bounds())
    yield from Finding.of_unused([name for name in layout.names if not bool(bends[layout[name]].any())])
    yield Finding.of_structure(posterior.structure.described, posterior.why)
    yield Finding.of_fisher(posterior.fisher.described)
    if posterior.averages_functions and posterior.readout.link == DEFAULT:
        yield Finding.of_functions(posterior.linearised.k, posterior.n_functions)
    yield from Finding.of_tensors_without_rule(_tensors_without_rule(posterior))
    yield from Finding.of_leading(_leading(posterior), posterior.structure)
    linearised = posterior.linearised
    yield Finding.of_rows(tuple(linearised.ruled), linearised.rest.names, linearised.vectorised)


def _gradient_findings(posterior: Fitted) -> Iterator[Finding]:
    """The gradients of data and prior at the trained weights, and the weight decay that would balance them."""
    prior, theta = posterior.prior, posterior.linearised.theta
    from_data, delta = posterior.data_gradient(), prior.P0.diagonal.detach()
    pull = delta * (theta - prior.mean)
    total, data, own = (float(v.norm()) for v in (from_data - pull, from_data, pull))
    yield Finding.of_gradient(total, data, own, _remedy(posterior))
    if not prior.mean.ndim and not bool(prior.mean):
        norm = float(theta @ theta) or 1.0
        yield Finding.of_weight_decay(float(theta @ from_data) / norm, float((delta * theta**2).sum()) / norm)


def _remedy(posterior: Fitted) -> str:
    """Advice for weights that are not at a mode, except what has been done already."""
    if posterior.refinement is not None or _validated(posterior):
        return ""
    if posterior.expansion is not None:
        return "The evidence is taken at the linear model's own mode; held-out data can check it: validation=..."
    return (
        "The evidence at them is only indicative: lw.tune(posterior, data) takes it at the linear model's own mode. Or "
        "train longer, with weight decay equal to the prior precision over N."
    )


def _validated(posterior: Fitted) -> bool:
    """Whether tuning used held-out data."""
    return any(getattr(step, "scale", None) is not None for step in posterior.history)


def training_gap(posterior: Fitted, data: Batches) -> float:
    """How much worse the first training data are predicted than by the network, in nats per likelihood term.

    With several ranks, the first data of each are used.
    """
    left, gap, count = -(-_MOST_CHECKED // distributed.world_size()), 0.0, 0
    for x, y in data:
        predictive, network, n = training_check(posterior, x, y, left)
        gap, count, left = gap + n * (predictive - network), count + n, left - n
        if not left:
            break
    whole, of = distributed.total(torch.tensor([gap, count], dtype=torch.float64)).tolist()
    return float(whole / of)


def training_check(posterior: Fitted, x: ModelInput, y: Any, most: int = _MOST_CHECKED) -> tuple[float, float, int]:
    """NLL per likelihood term on training data: of the predictive, of the network alone; and the number of data."""
    with random_state_kept():
        x, encoded = encode_batch(x, y, posterior.likelihood, posterior.sites)
        n = min(x.n, most)
        some, targets = x.rows(slice(0, n)), tuple(v[:n] for v in y) if isinstance(y, tuple) else y[:n]
        f = posterior.sites.split(posterior.linearised.outputs(some).double())
        network = _at_network_noise(posterior).log_prob(f, encoded[:n])
        return -float(predicted(posterior, some).log_prob(targets).mean()), -float(network.mean()), n


def _at_network_noise(posterior: Fitted) -> Likelihood:
    """The likelihood of the network alone: a Gaussian's noise is then estimated from the network's residuals."""
    if not isinstance(posterior.likelihood, Gaussian) or not posterior.likelihood.estimated:
        return posterior.likelihood
    return posterior.likelihood.estimate(posterior.estimate.statistics.likelihood)


def _mode_findings(posterior: Fitted) -> Iterator[Finding]:
    yield from (Finding("left open", "by tuning, within its budget", False, words) for words in posterior.left_open)
    if posterior.expansion is None:
        return
    search, theta = posterior.expansion.search, posterior.linearised.theta
    distance = float((posterior.linear_mode() - theta).detach().norm())
    relative = None if search is None else search.relative_gradient
    converged = search is None or search.converged
    yield Finding.of_linear_mode(distance, float(theta.norm()), relative, converged, _validated(posterior))


def dimension_by_layer(posterior: Fitted) -> dict[str, tuple[float, int]]:
    """γ = Σ_i (1 − δ_i (P⁻¹)_ii) and the number of parameters, for each module."""
    if not posterior.precision.has_weights:
        return _dimension_by_group(posterior)
    each = 1 - posterior.prior.P0.diagonal.detach() * posterior.precision.inv_diagonal().detach()
    return {
        path or "(model)": (float(each[s].sum()), s.stop - s.start)
        for path, s in posterior.layout.module_slices.items()
    }


def _dimension_by_group(posterior: Fitted) -> dict[str, tuple[float, int]]:
    gamma, sizes = posterior.effective_dimension().detach().tolist(), posterior.prior.P0.sizes.tolist()
    return {n: (g, int(p)) for n, g, p in zip(posterior.prior.group_names, gamma, sizes, strict=True)}


def _leading(posterior: Fitted) -> list[tuple[int, int, float]]:
    """Side, directions kept and their share of the trace, of the Kronecker factors that are not kept whole."""
    whole = posterior.curvature
    blocks = whole.blocks if isinstance(whole, BlockDiagonalCurvature) else ()
    layers = [H.factors for H in blocks if isinstance(H, KroneckerCurvature)]
    factors = [factor for layer in layers for factor in (layer.eigen_A, layer.eigen_B)]
    found = [(factor.held.shape[1], factor.kept) for factor in factors if isinstance(factor, LeadingEigen)]
    return [(side, directions, float(shares.min())) for side, (directions, shares) in found]


def _tensors_without_rule(posterior: Fitted) -> list[tuple[str, str]]:
    """Tensors without a Kronecker rule, and how each was treated."""
    if not posterior.structure.whole_tensors or not isinstance(posterior.curvature, BlockDiagonalCurvature):
        return []
    treated = {DiagonalCurvature: "exact diagonal", DenseCurvature: "exact dense block"}
    treated[LowRankCurvature] = "exact dense block, kept as rows"
    starts = {posterior.layout[name].start: name for name in posterior.layout.names}
    blocks = zip(posterior.curvature.slices, posterior.curvature.blocks, strict=True)
    return [(starts[s.start], treated[type(H)]) for s, H in blocks if type(H) in treated]
