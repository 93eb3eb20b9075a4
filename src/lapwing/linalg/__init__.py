"""Numerical linear algebra on plain tensors: no model, no data."""

from lapwing.linalg.gram import GramSum
from lapwing.linalg.pivoted_cholesky import PartialCholesky, pivoted_cholesky, semidefinite_eigenvalues
from lapwing.linalg.symmetric import add_gram_, mirror_

__all__ = ["GramSum", "PartialCholesky", "add_gram_", "mirror_", "pivoted_cholesky", "semidefinite_eigenvalues"]
