"""Estimators: (Linearised, likelihood, data) → Curvature."""

from lapwing.curvature.accumulate import Block, Diag, Full, Structure
from lapwing.curvature.estimate import Estimate, FitStatistics, estimate
from lapwing.curvature.factors import Empirical, Exact, Fisher, Sampled

__all__ = [
    "Block",
    "Diag",
    "Empirical",
    "Estimate",
    "Exact",
    "Fisher",
    "FitStatistics",
    "Full",
    "Sampled",
    "Structure",
    "estimate",
]
