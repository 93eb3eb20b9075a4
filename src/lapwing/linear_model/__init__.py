"""The linearised network as a model of its own: J over the data, and its mode by Newton's method."""

from lapwing.data.fixed_order import in_data_order, in_fixed_order, unshuffled
from lapwing.linear_model.design import (
    DEFAULT_PASSES,
    Design,
    Piece,
    StoredDesign,
    StoredPiece,
    StreamedDesign,
    default_passes,
    design,
    is_stored,
    most_work,
)
from lapwing.linear_model.mode import (
    PRECISE,
    Expansion,
    Problem,
    Search,
    StoppingRule,
    polished,
    solve_hessian,
    solve_mode,
)
from lapwing.linear_model.refinement import Elbo, Refinement

__all__ = [
    "DEFAULT_PASSES",
    "PRECISE",
    "Design",
    "Elbo",
    "Expansion",
    "Piece",
    "Problem",
    "Refinement",
    "Search",
    "StoppingRule",
    "StoredDesign",
    "StoredPiece",
    "StreamedDesign",
    "default_passes",
    "design",
    "in_data_order",
    "in_fixed_order",
    "is_stored",
    "most_work",
    "polished",
    "solve_hessian",
    "solve_mode",
    "unshuffled",
]
