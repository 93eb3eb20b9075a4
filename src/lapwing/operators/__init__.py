"""Matrices: curvature H and precision P = H + P₀; one structure a file."""

from lapwing.operators import axes
from lapwing.operators.arrangement import Arrangement
from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.block_diagonal import BlockDiagonalCurvature, BlockDiagonalPrecision
from lapwing.operators.bounded import BoundedCurvature, BoundedPrecision
from lapwing.operators.combined_rows import CombinedRows
from lapwing.operators.coordinates import Coordinates
from lapwing.operators.dense import DenseCurvature, DensePrecision, SymmetricMatrix
from lapwing.operators.dense_rows import DenseRows
from lapwing.operators.diagonal import DiagonalCurvature, DiagonalPrecision
from lapwing.operators.eigen import WHOLE, Eigen, Factor, Leading, LeadingEigen, combined
from lapwing.operators.grouped_diagonal import GroupedDiagonal, one_group
from lapwing.operators.kronecker import (
    EigenCurvature,
    KroneckerCurvature,
)
from lapwing.operators.kronecker_factors import (
    Basis,
    Damping,
    ExactDamping,
    KroneckerFactors,
    SplitDamping,
)
from lapwing.operators.low_rank import LowRankCurvature, LowRankPrecision
from lapwing.operators.matrix_free import MatrixFreeCurvature, MatrixFreePrecision, MatrixProducts
from lapwing.operators.quadratic_forms import inv_quads
from lapwing.operators.root_kernels import RootKernels
from lapwing.operators.rotated import MOST_KEPT, RotatedPrecision
from lapwing.operators.sampled import SampledCurvature, SampledPrecision
from lapwing.operators.separate import SeparateCurvature, SeparatePrecision
from lapwing.operators.written_rows import WrittenRows, stacked

__all__ = [
    "MOST_KEPT",
    "WHOLE",
    "Arrangement",
    "Basis",
    "BlockDiagonalCurvature",
    "BlockDiagonalPrecision",
    "BoundedCurvature",
    "BoundedPrecision",
    "CombinedRows",
    "Coordinates",
    "Curvature",
    "Damping",
    "DenseCurvature",
    "DensePrecision",
    "DenseRows",
    "DiagonalCurvature",
    "DiagonalPrecision",
    "Eigen",
    "EigenCurvature",
    "ExactDamping",
    "Factor",
    "GroupedDiagonal",
    "KroneckerCurvature",
    "KroneckerFactors",
    "Leading",
    "LeadingEigen",
    "LowRankCurvature",
    "LowRankPrecision",
    "MatrixFreeCurvature",
    "MatrixFreePrecision",
    "MatrixProducts",
    "Precision",
    "RootKernels",
    "RotatedPrecision",
    "Rows",
    "SampledCurvature",
    "SampledPrecision",
    "SeparateCurvature",
    "SeparatePrecision",
    "SplitDamping",
    "SymmetricMatrix",
    "WrittenRows",
    "axes",
    "combined",
    "inv_quads",
    "one_group",
    "stacked",
]
