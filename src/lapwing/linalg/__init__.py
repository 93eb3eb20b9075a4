"""Numerical linear algebra on plain tensors: no model, no data."""

from lapwing.linalg.pivoted_cholesky import PartialCholesky, pivoted_cholesky, semidefinite_eigenvalues

__all__ = ["PartialCholesky", "pivoted_cholesky", "semidefinite_eigenvalues"]
