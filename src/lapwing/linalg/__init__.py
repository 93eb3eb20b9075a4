"""Numerical linear algebra on plain tensors: no model, no data."""

from lapwing.linalg.cg import CG, Product, Solution, conjugate_gradients
from lapwing.linalg.eigen import Eigenpairs, leading_eigenpairs
from lapwing.linalg.estimated import Estimated
from lapwing.linalg.finite import all_finite
from lapwing.linalg.gram import (
    FLOAT32_SIDE,
    GramSum,
    ProductSum,
    add_converted_,
    aligned_product,
    at_least_float32,
    stored_dtype,
)
from lapwing.linalg.joined import joined
from lapwing.linalg.lanczos import Applied, Krylov, apply_function, inverse_root, lanczos_quadrature
from lapwing.linalg.log_grid import products_on_grid
from lapwing.linalg.pivoted_cholesky import (
    PartialCholesky,
    pivoted_cholesky,
    semidefinite_eigenvalues,
)
from lapwing.linalg.probes import Probes, Rademacher, UnitVectors
from lapwing.linalg.recomputed import recomputed
from lapwing.linalg.roots import safe_sqrt, symmetric_root
from lapwing.linalg.sketch import GramSketch, RowSum, Sketch
from lapwing.linalg.symmetric import add_gram_, mirror_
from lapwing.linalg.trace import hutch_plus_plus, hutchinson, signs, trace, xtrace

__all__ = [
    "CG",
    "FLOAT32_SIDE",
    "Applied",
    "Eigenpairs",
    "Estimated",
    "GramSketch",
    "GramSum",
    "Krylov",
    "PartialCholesky",
    "Probes",
    "Product",
    "ProductSum",
    "Rademacher",
    "RowSum",
    "Sketch",
    "Solution",
    "UnitVectors",
    "add_converted_",
    "add_gram_",
    "aligned_product",
    "all_finite",
    "apply_function",
    "at_least_float32",
    "conjugate_gradients",
    "hutch_plus_plus",
    "hutchinson",
    "inverse_root",
    "joined",
    "lanczos_quadrature",
    "leading_eigenpairs",
    "mirror_",
    "pivoted_cholesky",
    "products_on_grid",
    "recomputed",
    "safe_sqrt",
    "semidefinite_eigenvalues",
    "signs",
    "stored_dtype",
    "symmetric_root",
    "trace",
    "xtrace",
]
