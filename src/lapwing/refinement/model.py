"""The linear model in memory: h(θ) = f + J (θ − θ̃) for every likelihood term, and the prior.

A likelihood term is one site of one datum; its outputs and targets form one row, so data with sites need no special
case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.curvature import FitStatistics
from lapwing.errors import InputError, located
from lapwing.likelihoods import Likelihood
from lapwing.network.jacobian import DenseBlock, Jacobian
from lapwing.network.products import Source
from lapwing.posterior import Posterior
from lapwing.priors import GaussianPrior
from lapwing.runtime import distributed

_PIECE_FLOATS = 1 << 23  # numbers in the rows that are contracted at a time
IN_CACHE = 1 << 17  # the same for elementwise work: rows that stay in the cache


@dataclass(frozen=True, eq=False)
class LinearModel:
    """Outputs, Jacobian and targets of m likelihood terms with c outputs each."""

    f: Float[Tensor, "m c"]
    J: Float[Tensor, "m c p"]
    y: Tensor
    n: int  # number of data
    theta: Float[Tensor, " p"]  # θ̃, where f and J were evaluated
    likelihood: Likelihood
    likelihood_scale: float  # κ
    prior: GaussianPrior
    own: slice  # the data of this rank

    @property
    def p(self) -> int:
        return self.J.shape[-1]

    @property
    def n_outputs(self) -> int:
        return self.f.numel()

    @property
    def rows(self) -> Float[Tensor, "mc p"]:
        return self.J.reshape(-1, self.p)

    # --- outputs and likelihood, κ included ----------------------------------------------------------

    def outputs(self, theta: Float[Tensor, " p"]) -> Float[Tensor, "m c"]:
        return self.f + self.jvp(theta - self.theta)

    def jvp(self, v: Float[Tensor, " p"]) -> Float[Tensor, "m c"]:
        """J v."""
        return (self.rows @ v).reshape(self.f.shape)

    def vjp(self, u: Float[Tensor, "m c"]) -> Float[Tensor, " p"]:
        """Jᵀ u."""
        return u.reshape(-1) @ self.rows

    def log_lik(self, h: Float[Tensor, "m c"]) -> float:
        return self.likelihood_scale * float(self.likelihood.log_prob(h, self.y).sum())

    def residual(self, h: Float[Tensor, "m c"]) -> Float[Tensor, "m c"]:
        return self.likelihood_scale * self.likelihood.residual(h, self.y)

    def hessian(self, h: Float[Tensor, "m c"]) -> Float[Tensor, "m c c"]:
        return self.likelihood_scale * self.likelihood.hessian(h, self.y)

    def hessian_root(self, h: Float[Tensor, "m c"]) -> Float[Tensor, "m c k"]:
        return self.likelihood_scale**0.5 * self.likelihood.hessian_root(h, self.y)

    def statistics(self, h: Float[Tensor, "m c"]) -> FitStatistics:
        """Log likelihood and its gradient at outputs h, at unit dispersion."""
        gradients = [self.vjp(r) for r in self.likelihood.part_residuals(h, self.y)]
        return FitStatistics(self.n, self.likelihood.statistics(h, self.y), torch.stack(gradients))

    # --- the prior ----------------------------------------------------------------------------------

    def prior_gradient(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """P₀ (θ − m₀)."""
        return self.prior.P0.diagonal * (theta - self.prior.mean)

    def scatter(self, theta: Float[Tensor, " p"]) -> Scalar:
        """(θ − m₀)ᵀ P₀ (θ − m₀)."""
        return (theta - self.prior.mean) @ self.prior_gradient(theta)

    @cached_property
    def kernel(self) -> Float[Tensor, "mc mc"]:
        """J P₀⁻¹ Jᵀ (mc, mc): the prior covariance of the outputs."""
        half = self.rows * self.prior.P0.diagonal.rsqrt()
        return half @ half.T

    # --- rows ---------------------------------------------------------------------------------------

    def pieces(self, floats: int = _PIECE_FLOATS) -> Iterator[slice]:
        """Slices of terms whose rows have at most `floats` numbers."""
        m, c = self.f.shape
        step = max(1, floats // (c * self.p))
        return (slice(start, min(start + step, m)) for start in range(0, m, step))

    def root_rows(self, S: Float[Tensor, "m c k"], some: slice) -> Float[Tensor, "mk p"]:
        """SᵀJ (mk, p) of some terms."""
        return (S[some].mT @ self.J[some]).reshape(-1, self.p)


def as_rows(M: Float[Tensor, "n c p"]) -> Jacobian:
    """A plain array as a Jacobian that operators can contract."""
    n, c, p = M.shape
    return Jacobian((DenseBlock(slice(0, p), M),), n, c, p, M.device)


def gathered(posterior: Posterior, source: Source) -> LinearModel:
    """One pass over the data: f, J and y, term by term. Ranks exchange theirs, so that all hold the same model."""
    sites, p = posterior.sites, posterior.layout.p
    f, J, y, own = _over_ranks(posterior, source) if distributed.is_distributed() else _in_place(posterior, source)
    n = len(f)
    return LinearModel(
        f.reshape(n * sites.t, sites.c),
        J.reshape(n * sites.t, sites.c, p),
        y.flatten(0, 1),
        n,
        posterior.linearised.theta,
        posterior.likelihood,
        float(posterior.likelihood_scale.detach()),
        posterior.prior,
        own,
    )


Rows = tuple[Float[Tensor, "n k"], Float[Tensor, "n k p"], Tensor]  # f, J and y


def _in_place(posterior: Posterior, source: Source) -> tuple[Tensor, Tensor, Tensor, slice]:
    """f (n, k), J (n, k, p) and targets of all data on a single process."""
    linearised, n = posterior.linearised, posterior.n_data
    k, p, device = linearised.k, linearised.layout.p, linearised.network.device
    f = torch.empty(n, k, dtype=torch.float64, device=device)
    # Filled in place: a list of batches and its concatenation would take twice the memory.
    J = torch.empty(n, k, p, dtype=torch.float64, device=device)
    targets, seen = [], 0
    for outputs, rows, y in _batches(posterior, source):
        some = slice(seen, seen + len(y))
        seen += len(y)
        if seen <= n:  # more data are an error, which is raised after they are counted
            f[some], J[some] = outputs, rows
            targets.append(y)
    check_number(seen, n)
    return f, J, torch.cat(targets), slice(0, n)


def _over_ranks(posterior: Posterior, source: Source) -> tuple[Tensor, Tensor, Tensor, slice]:
    """The same, gathered from all ranks; the slice marks the data of this rank."""
    own = list(_batches(posterior, source))
    numbers = distributed.gathered(sum(len(y) for *_, y in own))
    check_number(sum(numbers), posterior.n_data)
    together = [rows for of_rank in distributed.gathered(own) for rows in of_rank]
    before = sum(numbers[: distributed.rank()])
    f, J, y = (torch.cat(column) for column in zip(*together, strict=True))
    return f, J, y, slice(before, before + numbers[distributed.rank()])


def _batches(posterior: Posterior, source: Source) -> Iterator[Rows]:
    """f and J in float64, with the outputs of a term in adjacent rows."""
    linearised, sites = posterior.linearised, posterior.sites
    order = sites.split(torch.arange(linearised.k, device=linearised.network.device)[None])[0].flatten()
    for number, (x, y) in enumerate(source()):
        with located(f"batch {number}"), linearised.trace(x) as trace:
            yield trace.outputs.double()[:, order], trace.jacobian().dense()[:, order].double(), y


def check_number(seen: int, n: int) -> None:
    """Raise if the data are not as many as the posterior was fitted on."""
    if seen != n:
        raise InputError(
            f"refine got {seen} data, but the posterior was fitted on {n}. Pass the training data: all of them, once."
        )
