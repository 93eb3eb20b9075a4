"""The linearised network as a model of its own: a convex GLM on the features J, with a mode of its own."""

from lapwing.linear_model.design import Design, Piece, StoredDesign, StreamedDesign, design
from lapwing.linear_model.jvp import choose_jvp
from lapwing.linear_model.mode import MODERATE, PRECISE, QUICK, Effort, Expansion, Problem, Search, solve_mode
from lapwing.linear_model.order import in_fixed_order

__all__ = [
    "MODERATE",
    "PRECISE",
    "QUICK",
    "Design",
    "Effort",
    "Expansion",
    "Piece",
    "Problem",
    "Search",
    "StoredDesign",
    "StreamedDesign",
    "choose_jvp",
    "design",
    "in_fixed_order",
    "solve_mode",
]
