"""E[log p(y | h)], E[r] and E[Λ] of every likelihood term under a Gaussian over its outputs, h ~ N(m, V).

In closed form for a Gaussian likelihood. Otherwise numerical integration with nodes h = m + R z, R Rᵀ = V: in one
dimension for outputs that do not interact, on a grid for few outputs, and with one fixed set of quasi-random nodes for
many. The same nodes serve all terms and steps (common random numbers), so the objective is deterministic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.likelihoods.output_curvature import Independent
from lapwing.predictive.links import covariance_root, sobol_normal

_MOST_NODES = {1: 4096, 2: 100, 3: 28}  # largest number of nodes per axis, by the number of axes
_MOST_ON_A_GRID = 3  # largest number of outputs of a term
_REACH = 8.0  # standard deviations that the grid covers on either side
_HALF_DRAWS = 256  # quasi-random nodes, before each is paired with its negative
_PIECE_FLOATS = 1 << 22  # numbers per array while terms are processed in pieces
_IN_CACHE = 1 << 16  # the same where several elementwise steps follow one another: arrays that stay in the cache


@dataclass(frozen=True, eq=False)
class Moments:
    """Expected log density summed over terms, and expected residual (m, c) and Hessian (m, c, c) of each term."""

    log_lik: Scalar
    residual: Float[Tensor, "m c"]
    hessian: Float[Tensor, "m c c"]

    def scaled(self, kappa: float) -> Moments:
        return Moments(kappa * self.log_lik, kappa * self.residual, kappa * self.hessian)


class Expectation(ABC):
    """A rule that computes the three expectations."""

    @abstractmethod
    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments: ...


@dataclass(frozen=True)
class QuadraticLogDensity(Expectation):
    """log p is quadratic in h: Λ is constant and r is linear, so all three are exact."""

    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments:
        Lambda = likelihood.hessian(mean, y)
        log_lik = likelihood.log_prob(mean, y).sum() - 0.5 * (Lambda * cov).sum()
        return Moments(log_lik, likelihood.residual(mean, y), Lambda)


@dataclass(frozen=True)
class IndependentOutputs(Expectation):
    """Outputs that do not interact (diagonal Λ): one-dimensional integrals, for all outputs of a term at once."""

    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments:
        std = cov.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        z, w = (t.to(mean) for t in trapezoidal(1, float(std.max()), coarsest=0.5, finest=0.7))
        log_lik, residuals, hessians = mean.new_zeros(()), [], []
        for some in _pieces(mean, len(z) * mean.shape[1] ** 2):
            h, targets = mean[some] + std[some] * z[:, :, None], _repeated(y[some], len(z))
            log_lik = log_lik + w @ likelihood.log_prob(h, targets).sum(-1)
            residuals.append(torch.einsum("q,qmc->mc", w, likelihood.residual(h, targets)))
            hessians.append(torch.einsum("q,qmcd->mcd", w, likelihood.hessian(h, targets)))
        return Moments(log_lik, torch.cat(residuals), torch.cat(hessians))


@dataclass(frozen=True)
class CoupledOutputs(Expectation):
    """Outputs that interact within a term, on a grid or on quasi-random nodes.

    The Hessian is estimated as −E[r zᵀ] R⁻¹ (Stein's identity), which equals E[Λ] up to the integration error. Unlike
    an average of Λ it is the exact gradient, in V, of the sum that approximates E[log p]; so steps increase that sum
    whatever its error. It also needs no Λ, which is a narrow peak where V is wide.
    """

    nodes: Nodes

    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments:
        root = covariance_root(cov)
        z, w = (t.to(mean) for t in self.nodes(float(root.norm(dim=-2).max())))
        log_lik, residuals, slopes = mean.new_zeros(()), [], []
        for some in _pieces(mean, len(z) * mean.shape[1]):
            h, targets = mean[some] + torch.einsum("mcd,qd->qmc", root[some], z), _repeated(y[some], len(z))
            r = likelihood.residual(h, targets)
            log_lik = log_lik + w @ likelihood.log_prob(h, targets).sum(-1)
            residuals.append(torch.einsum("q,qmc->mc", w, r))
            slopes.append(torch.einsum("q,qmc,qd->mcd", w, r, z))
        Lambda = _semidefinite(-torch.cat(slopes) @ torch.linalg.pinv(root))
        return Moments(log_lik, torch.cat(residuals), Lambda)


@dataclass(frozen=True)
class SoftmaxOutputs(Expectation):
    """`CoupledOutputs` for a softmax. Nodes do not depend on labels: E[p], E[p zᵀ] and E[logsumexp h] are sufficient.

    As E[z] = 0: E[log p(y)] = m_y − E[logsumexp h], E[r] = e_y − E[p] and −E[r zᵀ] = E[p zᵀ]. A softmax depends on
    differences of logits only, so the integral is over the differences to the last one.
    """

    nodes: Nodes

    def __call__(
        self, likelihood: Likelihood, y: Tensor, mean: Float[Tensor, "m c"], cov: Float[Tensor, "m c c"]
    ) -> Moments:
        assert isinstance(likelihood, Categorical)
        root = covariance_root(_differences(cov))
        z, w = (t.to(mean) for t in self.nodes(float(root.norm(dim=-2).max())))
        sizes, probs, slopes = [], [], []
        for some in _pieces(mean, len(z) * mean.shape[1], _IN_CACHE):
            size, p = _softmax(mean[some], root[some] @ z.T)
            sizes.append(size @ w)
            probs.append(p @ w)
            slopes.append(p[:, :-1] @ (w[:, None] * z))
        weight, p = likelihood.term_weight(mean, y), torch.cat(probs)
        label = y[:, None] == torch.arange(mean.shape[1], device=y.device)
        log_p = mean.where(label, 0.0).sum(-1) - torch.cat(sizes)
        others = p.where(~label, 0.0)
        r = torch.where(label, others.sum(-1, keepdim=True), -others)  # 1 − p_y would lose digits near p_y = 1
        Lambda = _semidefinite(weight[:, None, None] * torch.cat(slopes) @ torch.linalg.pinv(root))
        log_lik = torch.where(weight > 0, weight * log_p, 0.0).sum()
        return Moments(log_lik, weight[:, None] * r, _of_differences(Lambda))


def _softmax(
    # The many nodes are the last axis, which is the fastest for reductions over outputs.
    mean: Float[Tensor, "m c"],
    moved: Float[Tensor, "m d q"],
) -> tuple[Float[Tensor, "m q"], Float[Tensor, "m c q"]]:
    """logsumexp and softmax of h, which is the mean plus `moved` in all outputs but the last."""
    h = mean[:, :, None].expand(-1, -1, moved.shape[-1]).clone()
    h[:, :-1] += moved
    top = h.amax(1)
    p = h.sub_(top[:, None]).exp_()
    total = p.sum(1)
    return top + total.log(), p.div_(total[:, None])


class Nodes(ABC):
    """Nodes z (q, d) and weights (q,) for the standard normal; `spread` is the largest standard deviation of h."""

    @abstractmethod
    def __call__(self, spread: float) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class GridNodes(Nodes):
    """A tensor-product trapezoidal rule."""

    axes: int

    def __call__(self, spread: float) -> tuple[Tensor, Tensor]:
        return trapezoidal(self.axes, spread, coarsest=0.7, finest=1.0)


@dataclass(frozen=True, eq=False)
class QuasiRandomNodes(Nodes):
    """Nodes z and −z, whitened so that their mean is 0 and their covariance I: exact for quadratic functions."""

    raw: Float[Tensor, "q d"]

    @cached_property
    def z(self) -> Float[Tensor, "_ d"]:
        z = torch.cat([self.raw, -self.raw])
        return torch.linalg.solve_triangular(torch.linalg.cholesky(z.T @ z / len(z)), z.T, upper=False).T

    def __call__(self, spread: float) -> tuple[Tensor, Tensor]:
        return self.z, torch.full((len(self.z),), 1 / len(self.z), dtype=torch.float64)


def trapezoidal(axes: int, spread: float, *, coarsest: float, finest: float) -> tuple[Tensor, Tensor]:
    """The trapezoidal rule, whose error for analytic integrands is of order e^(−2πd/spacing).

    d is the distance from the real axis at which the log density has a singularity: π for a sigmoid. Gauss–Hermite
    nodes have a fixed spacing in standard deviations. Here it is at most `finest` in units of the outputs, so wide
    Gaussians get more nodes, up to a limit.
    """
    spacing = min(coarsest, finest / max(spread, 1e-300))
    n = min(_MOST_NODES[axes], 1 + ceil(2 * _REACH / spacing))
    nodes = torch.linspace(-_REACH, _REACH, n, dtype=torch.float64)
    z = torch.cartesian_prod(*[nodes] * axes).reshape(-1, axes)
    # Weights are normalised to sum to one, so that constants are integrated exactly.
    return z, torch.softmax(-0.5 * z.square().sum(-1), 0)


def expectation(likelihood: Likelihood, c: int, y: Tensor, *, generator: torch.Generator) -> Expectation:
    """The cheapest rule that is exact or nearly exact for the likelihood."""
    if isinstance(likelihood, Gaussian):
        return QuadraticLogDensity()
    if _independent(likelihood, c, y):
        return IndependentOutputs()
    classes = isinstance(likelihood, Categorical)
    d = c - 1 if classes else c
    nodes = (
        GridNodes(d) if c <= _MOST_ON_A_GRID else QuasiRandomNodes(sobol_normal(_HALF_DRAWS, d, generator=generator))
    )
    return SoftmaxOutputs(nodes) if classes else CoupledOutputs(nodes)


def _independent(likelihood: Likelihood, c: int, y: Tensor) -> bool:
    f = torch.zeros(1, c, dtype=torch.float64, device=y.device)
    return all(isinstance(part, Independent) for part in likelihood.part_curvatures(f, y[:1]))


def _pieces(mean: Float[Tensor, "m c"], floats: int, most: int = _PIECE_FLOATS) -> Iterator[slice]:
    """Slices of terms such that `floats` numbers per term fit into `most`."""
    step = max(1, most // floats)
    return (slice(start, start + step) for start in range(0, len(mean), step))


def _repeated(y: Tensor, n: int) -> Tensor:
    return y.expand(n, *y.shape)


def _differences(cov: Float[Tensor, "m c c"]) -> Float[Tensor, "m d d"]:
    """Covariance of the differences to the last output."""
    return cov[..., :-1, :-1] - cov[..., :-1, -1:] - cov[..., -1:, :-1] + cov[..., -1:, -1:]


def _of_differences(Lambda: Float[Tensor, "m d d"]) -> Float[Tensor, "m c c"]:
    """The Hessian in all outputs from that in differences: rows and columns sum to zero."""
    wide = torch.cat([Lambda, -Lambda.sum(-1, keepdim=True)], -1)
    return torch.cat([wide, -wide.sum(-2, keepdim=True)], -2)


def _semidefinite(Lambda: Float[Tensor, "m d d"]) -> Float[Tensor, "m d d"]:
    """The symmetric part with negative eigenvalues set to zero; E[Λ] of a concave log density has none."""
    values, U = torch.linalg.eigh((Lambda + Lambda.mT) / 2)
    return (U * values.clamp(min=0)[..., None, :]) @ U.mT
