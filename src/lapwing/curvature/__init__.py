"""The pass over the data: (linearised network, likelihood, batches) → curvature H; one structure a file."""

from lapwing.curvature.block import Block
from lapwing.curvature.checkpointing import NO_CHECKPOINT, PassCheckpoint
from lapwing.curvature.diagonal import Diag
from lapwing.curvature.ekfac import Ekfac
from lapwing.curvature.estimate import Estimate, estimate
from lapwing.curvature.factors import Drawing, Empirical, Exact, Fisher, Labels, Sampled, Signs
from lapwing.curvature.full import Full
from lapwing.curvature.gauss_newton import GaussNewton
from lapwing.curvature.gp import GP
from lapwing.curvature.kronecker import Kron
from lapwing.curvature.low_rank import LowRank
from lapwing.curvature.matrix_free import MatrixFree
from lapwing.curvature.model_summary import ModelSummary
from lapwing.curvature.nystrom import Nystrom
from lapwing.curvature.registry import STRUCTURES
from lapwing.curvature.statistics import FitStatistics
from lapwing.curvature.structure import Structure, Trial
from lapwing.curvature.workload import Workload

__all__ = [
    "GP",
    "NO_CHECKPOINT",
    "STRUCTURES",
    "Block",
    "Diag",
    "Drawing",
    "Ekfac",
    "Empirical",
    "Estimate",
    "Exact",
    "Fisher",
    "FitStatistics",
    "Full",
    "GaussNewton",
    "Kron",
    "Labels",
    "LowRank",
    "MatrixFree",
    "ModelSummary",
    "Nystrom",
    "PassCheckpoint",
    "Sampled",
    "Signs",
    "Structure",
    "Trial",
    "Workload",
    "estimate",
]
