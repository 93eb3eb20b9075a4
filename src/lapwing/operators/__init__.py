"""Matrices: curvature H, precision H + P₀, one structure per file."""

from lapwing.operators.base import Curvature, Precision, Rows
from lapwing.operators.block_diagonal import BlockDiagonalCurvature, BlockDiagonalPrecision
from lapwing.operators.dense import DenseCurvature, DensePrecision
from lapwing.operators.diagonal import DiagonalCurvature, DiagonalPrecision
from lapwing.operators.grouped_diagonal import GroupedDiagonal
from lapwing.operators.low_rank import LowRankCurvature, LowRankPrecision, stacked

__all__ = [
    "BlockDiagonalCurvature",
    "BlockDiagonalPrecision",
    "Curvature",
    "DenseCurvature",
    "DensePrecision",
    "DiagonalCurvature",
    "DiagonalPrecision",
    "GroupedDiagonal",
    "LowRankCurvature",
    "LowRankPrecision",
    "Precision",
    "Rows",
    "stacked",
]
