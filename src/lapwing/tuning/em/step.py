"""The record of one EM step, as in `posterior.history`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EMStep:
    """Hyperparameters, and statistics of the samples drawn under them."""

    precisions: tuple[float, ...]  # α of each group (for a g-prior, the factor on its curvature)
    noise_std: tuple[float, ...]
    effective_dimension: tuple[float, ...]  # γ of each group, from the samples
    standard_error: tuple[float, ...]  # of γ, over the samples
    change: float  # largest change of a log precision or log noise in the M-step before; 0 at the start
    residual: float  # relative residual of the samples' linear systems; 0 for direct solvers
    gradient: float  # relative gradient at the linear model's mode; 0 at the trained weights
    n_products: int  # passes over the data for the samples
    target_share: float  # share of the minibatch gradient's variance with targets in the data
    note: str = ""
