"""E[log p(y | h)], E[r] and E[Λ] of every likelihood term under a Gaussian over its outputs, h ~ N(m, V).

In closed form for a Gaussian likelihood; else as weighted sums over points h = m + R z with R Rᵀ = V: a grid where few
outputs meet in one term, and beyond that one fixed set of quasi-random points for all terms and steps (common random
numbers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.likelihoods.output_curvature import Independent
from lapwing.predictive.links import covariance_root, sobol_normal

_MOST_NODES = {1: 4096, 2: 100, 3: 28}  # per axis, by the number of axes
_MOST_ON_A_GRID = 3  # outputs of one term
_REACH = 8.0  # deviations
_HALF_DRAWS = 256
_PIECE_FLOATS = 1 << 22


@dataclass(frozen=True, eq=False)
class Moments:
    """Summed log density, and residual and curvature of every term, all in expectation."""

    log_lik: Scalar
    residual: Float[Tensor, "m c"]
    hessian: Float[Tensor, "m c c"]


class Expectation(ABC):
    sampled: bool  # whether the error of the rule is more than rounding

    @abstractmethod
    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments: ...


@dataclass(frozen=True)
class Quadratic(Expectation):
    """log p is quadratic in h, so Λ is constant and r is linear."""

    sampled = False

    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments:
        Lambda = likelihood.hessian(mean, y)
        log_lik = likelihood.log_prob(mean, y).sum() - 0.5 * (Lambda * cov).sum()
        return Moments(log_lik, likelihood.residual(mean, y), Lambda)


@dataclass(frozen=True)
class Grid(Expectation):
    """The trapezoidal rule on a grid of z, which for analytic integrands is exact up to e^(−2πd/spacing).

    d is how far from the real axis the log density is analytic: π for a sigmoid. Gauss–Hermite nodes have a fixed
    spacing in standard deviations; here wide Gaussians get more nodes, and one axis as many as rounding asks for.
    """

    axes: int
    root: Callable[[Tensor], Tensor]  # V (m, c, c) → R (m, c, axes)

    @property
    def sampled(self) -> bool:  # type: ignore[override]
        return self.axes > 1  # where the number of nodes has to stop short

    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments:
        R = self.root(cov)
        spread = float(R.norm(dim=-2).max())
        spacing = min(0.5, 0.7 / spread) if self.axes == 1 else min(0.7, 1.0 / spread)
        nodes = torch.linspace(
            -_REACH, _REACH, min(_MOST_NODES[self.axes], 1 + ceil(2 * _REACH / spacing)), dtype=torch.float64
        )
        z = torch.cartesian_prod(*[nodes] * self.axes).reshape(-1, self.axes)
        weights = torch.softmax(-0.5 * z.square().sum(-1), 0)
        return _summed(likelihood, y, mean, R, z, weights)


@dataclass(frozen=True, eq=False)
class Draws(Expectation):
    """The mean over fixed points."""

    z: Float[Tensor, "q d"]
    root: Callable[[Tensor], Tensor]
    sampled = True

    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments:
        q = len(self.z)
        return _summed(likelihood, y, mean, self.root(cov), self.z, torch.full((q,), 1 / q, dtype=torch.float64))


def _summed(
    likelihood: Likelihood,
    y: Tensor,
    mean: Float[Tensor, "m c"],
    R: Float[Tensor, "m c d"],
    z: Float[Tensor, "q d"],
    weights: Float[Tensor, " q"],
) -> Moments:
    """Σ_q w_q g(m + R z_q), some terms at a time."""
    (m, c), z, w = mean.shape, z.to(mean), weights.to(mean)
    log_lik, residuals, hessians = mean.new_zeros(()), [], []
    step = max(1, _PIECE_FLOATS // (len(z) * c * c))
    for some in (slice(start, start + step) for start in range(0, m, step)):
        h = mean[some] + torch.einsum("mcd,qd->qmc", R[some], z)
        targets = y[some].expand(len(z), *y[some].shape)
        log_lik = log_lik + w @ likelihood.log_prob(h, targets).sum(-1)
        residuals.append(torch.einsum("q,qmc->mc", w, likelihood.residual(h, targets)))
        hessians.append(torch.einsum("q,qmcd->mcd", w, likelihood.hessian(h, targets)))
    return Moments(log_lik, torch.cat(residuals), torch.cat(hessians))


def expectation(likelihood: Likelihood, c: int, y: Tensor, *, generator: torch.Generator) -> Expectation:
    """The cheapest rule that is exact or nearly so."""
    if isinstance(likelihood, Gaussian):
        return Quadratic()
    if _independent(likelihood, c, y):
        return Grid(1, _deviations)  # each output has its own term in the sum: one axis serves them all
    d, root = (c - 1, _difference_root) if isinstance(likelihood, Categorical) else (c, covariance_root)
    if c <= _MOST_ON_A_GRID:
        return Grid(d, root)
    z = sobol_normal(_HALF_DRAWS, d, generator=generator)
    z = torch.cat([z, -z])  # with mean zero, and then the identity as covariance: quadratics are exact
    return Draws(torch.linalg.solve_triangular(torch.linalg.cholesky(z.T @ z / len(z)), z.T, upper=False).T, root)


def _independent(likelihood: Likelihood, c: int, y: Tensor) -> bool:
    f = torch.zeros(1, c, dtype=torch.float64, device=y.device)
    return all(isinstance(part, Independent) for part in likelihood.part_curvatures(f, y[:1]))


def _deviations(cov: Float[Tensor, "m c c"]) -> Float[Tensor, "m c 1"]:
    return cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()[..., None]


def _difference_root(cov: Float[Tensor, "m c c"]) -> Float[Tensor, "m c d"]:
    """Of the outputs less the last one, which is all a softmax sees: one axis fewer."""
    D = cov[..., :-1, :-1] - cov[..., :-1, -1:] - cov[..., -1:, :-1] + cov[..., -1:, -1:]
    return torch.nn.functional.pad(covariance_root(D), (0, 0, 0, 1))
