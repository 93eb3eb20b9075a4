"""How the posterior of an image is held: as a matrix, or as products from which samples are drawn.

prior  x − x̂ ~ N(0, S),  S = J S_θ Jᵀ;   data  y = A x + e;   posterior covariance  S − S Aᵀ K⁻¹ A S
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import NumericalError
from lapwing.imaging.operator import Operator


class Way(ABC):
    """What is asked of the posterior's deviation from its mean."""

    name: str

    @abstractmethod
    def variance(self) -> Float[Tensor, " d"]: ...

    @abstractmethod
    def covariance(self) -> Float[Tensor, "d d"]: ...

    @abstractmethod
    def covariances(self, pixels: Tensor) -> Float[Tensor, "b k k"]:
        """Of groups of pixels (b, k)."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator) -> Float[Tensor, "n d"]: ...

    @abstractmethod
    def log_det_and_quad(self, target: Float[Tensor, " m"]) -> tuple[Scalar, Scalar]:
        """log det K and yᵀK⁻¹y."""

    @abstractmethod
    def accuracy(self) -> str:
        """How exact these answers are, in words."""


def matheron(
    prior: Float[Tensor, "n d"], noise: Float[Tensor, "n m"], measured: Float[Tensor, "n m"], gain: Float[Tensor, "m d"]
) -> Float[Tensor, "n d"]:
    """Draws from the posterior out of draws from the prior: x₀ + S Aᵀ K⁻¹ (e − A x₀), gain = K⁻¹ A S.

    Each is what the posterior mean would do with data e − A x₀: Matheron's rule.
    """
    return prior + (noise - measured) @ gain


@dataclass(frozen=True, eq=False)
class DenseWay(Way):
    """S (d, d) written out: everything is exact."""

    A: Operator
    S: Float[Tensor, "d d"]
    noise_var: float
    name = "dense"

    @cached_property
    def cross(self) -> Float[Tensor, "m d"]:
        """A S."""
        return self.A.linear(self.S).T

    @cached_property
    def root(self) -> Float[Tensor, "m m"]:
        """The Cholesky factor of K."""
        K = self.A.linear(self.cross)
        K = 0.5 * (K + K.T)
        K.diagonal().add_(self.noise_var)
        L, info = torch.linalg.cholesky_ex(K)
        if int(info):
            raise NumericalError(
                f"imaging: the covariance of the data is not positive definite (leading minor {int(info)}): the noise, "
                f"of standard deviation {sqrt(self.noise_var):.2g}, is too small for double precision."
            )
        return L

    @cached_property
    def _explained(self) -> Float[Tensor, "m d"]:
        """W = L⁻¹ A S: what the data take away is Wᵀ W."""
        return torch.linalg.solve_triangular(self.root, self.cross, upper=False)

    @cached_property
    def _covariance(self) -> Float[Tensor, "d d"]:
        cov = self.S - self._explained.T @ self._explained
        return 0.5 * (cov + cov.T)

    @cached_property
    def _prior_root(self) -> Float[Tensor, "d d"]:
        """R with R Rᵀ = S, also where S has no inverse."""
        values, U = torch.linalg.eigh(self.S)
        return U * values.clamp(min=0).sqrt()

    def variance(self) -> Float[Tensor, " d"]:
        return self._covariance.diagonal().clamp(min=0)

    def covariance(self) -> Float[Tensor, "d d"]:
        return self._covariance.clone()

    def covariances(self, pixels: Tensor) -> Float[Tensor, "b k k"]:
        return self._covariance[pixels[:, :, None], pixels[:, None, :]]

    def sample(self, n: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
        eps = torch.randn(n, len(self.S), dtype=torch.float64, generator=generator)
        u = torch.randn(n, self.A.linear.m, dtype=torch.float64, generator=generator)
        x0 = eps @ self._prior_root.T
        gain = torch.cholesky_solve(self.cross, self.root)
        return matheron(x0, sqrt(self.noise_var) * u, self.A.linear(x0), gain)

    def log_det_and_quad(self, target: Float[Tensor, " m"]) -> tuple[Scalar, Scalar]:
        solved = torch.linalg.solve_triangular(self.root, target[:, None], upper=False)
        return 2 * self.root.diagonal().log().sum(), solved.square().sum()

    def accuracy(self) -> str:
        return "exact, in double precision"
