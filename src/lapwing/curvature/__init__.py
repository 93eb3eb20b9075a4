"""Estimators: (Linearised, likelihood, data) → Curvature."""

from lapwing.curvature.accumulate import Block, Diag, Full, Structure
from lapwing.curvature.estimate import Estimate, FitStatistics, estimate
from lapwing.curvature.factors import Empirical, Exact, Fisher, Sampled
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.gp import GP
from lapwing.curvature.kronecker import Ekfac, Kron
from lapwing.curvature.low_rank import LowRank
from lapwing.curvature.matrix_free import MatrixFree

__all__ = [
    "GP",
    "Block",
    "Diag",
    "Ekfac",
    "Empirical",
    "Estimate",
    "Exact",
    "Fisher",
    "FitStatistics",
    "Full",
    "GaussNewton",
    "Kron",
    "LowRank",
    "MatrixFree",
    "Sampled",
    "Structure",
    "estimate",
]
