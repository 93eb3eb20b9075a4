"""Estimators: (Linearised, likelihood, data) → Curvature."""

from lapwing.curvature.accumulate import Block, Diagonal, Full, Structure
from lapwing.curvature.estimate import Estimate, FitStatistics, estimate
from lapwing.curvature.factors import Empirical, Exact, Fisher, Sampled

__all__ = [
    "Block",
    "Diagonal",
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
