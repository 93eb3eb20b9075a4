"""One step of EM, as the posterior's history tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EMStep:
    """Hyperparameters, and what the samples drawn for them say."""

    precisions: tuple[float, ...]  # α of each group; with a g-prior, of each group's curvature
    noise_std: tuple[float, ...]
    effective_dimension: tuple[float, ...]  # γ of each group, from the samples
    standard_error: tuple[float, ...]  # of γ, over the samples
    change: float  # largest change of a log precision or log noise that led here; 0 at the start
    residual: float  # of the samples' equations, relative; 0 where they were solved directly
    gradient: float  # at the linear model's mode, relative; 0 at the trained weights
    n_products: int  # passes with products that the samples took
    target_share: float  # of a minibatch gradient's variance, in (B1) form; the other form has the rest
    note: str = ""
