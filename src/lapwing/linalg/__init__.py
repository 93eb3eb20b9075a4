"""Numerical linear algebra on plain tensors: no model, no data."""

from lapwing.linalg.finite import all_finite
from lapwing.linalg.gram import GramSum, Products
from lapwing.linalg.pivoted_cholesky import PartialCholesky, pivoted_cholesky, semidefinite_eigenvalues
from lapwing.linalg.symmetric import add_gram_, mirror_

__all__ = [
    "GramSum",
    "PartialCholesky",
    "Products",
    "add_gram_",
    "all_finite",
    "mirror_",
    "pivoted_cholesky",
    "semidefinite_eigenvalues",
]
