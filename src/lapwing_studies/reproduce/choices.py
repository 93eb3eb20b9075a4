"""The two options that studies of the evidence compare: where it is evaluated, and the groups of the prior."""

from __future__ import annotations

from typing import Any

from torch import nn

import lapwing as lw

MODES = {"linear mode": "linear", "trained weights": "network"}


def tuned(posterior: lw.Posterior, model: nn.Module, data: Any, evidence: str, groups: str) -> lw.Posterior:
    """The posterior tuned by the evidence, evaluated at the linear mode or at the trained weights.

    The curvature is that at the network's outputs, as published, so that only the point of the evidence differs.
    """
    if groups == "normalised":
        posterior = posterior.with_prior(lw.prior(model, groups=groups, data=data))
        return lw.tune(posterior, data, mode=MODES[evidence], curvature_at="network")
    return lw.tune(posterior, data, mode=MODES[evidence], groups=groups, curvature_at="network")


def typical_precision(posterior: lw.Posterior) -> float:
    """Geometric mean of the prior precisions over weights."""
    prior = posterior.prior
    return float(prior.precisions.detach().log()[prior.index].mean().exp())
