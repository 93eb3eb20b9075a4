"""The linear model with everything in memory: h(θ) = f + J (θ − θ̃) at every likelihood term, and the prior.

A term is one site of one datum; its outputs and targets stand in one row, so that all terms look alike.
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

_PIECE_FLOATS = 1 << 23  # of rows that are contracted at a time
IN_CACHE = 1 << 17  # the same, for work on each entry: what was just written is read again


@dataclass(frozen=True, eq=False)
class LinearModel:
    f: Float[Tensor, "m c"]
    J: Float[Tensor, "m c p"]
    y: Tensor
    n: int  # data
    theta: Float[Tensor, " p"]  # θ̃, where f and J were taken
    likelihood: Likelihood
    likelihood_scale: float  # κ
    prior: GaussianPrior
    own: slice  # the data of this process

    @property
    def p(self) -> int:
        return self.J.shape[-1]

    @property
    def n_outputs(self) -> int:
        return self.f.numel()

    @property
    def rows(self) -> Float[Tensor, "mc p"]:
        return self.J.reshape(-1, self.p)

    # --- outputs and what the likelihood says of them, κ included -----------------------------------

    def outputs(self, theta: Float[Tensor, " p"]) -> Float[Tensor, "m c"]:
        return self.f + self.pushed(theta - self.theta)

    def pushed(self, v: Float[Tensor, " p"]) -> Float[Tensor, "m c"]:
        """J v."""
        return (self.rows @ v).reshape(self.f.shape)

    def pulled(self, u: Float[Tensor, "m c"]) -> Float[Tensor, " p"]:
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
        """Log likelihood and gradient of the linear model where its outputs are h, at unit dispersion."""
        gradients = [self.pulled(r) for r in self.likelihood.part_residuals(h, self.y)]
        return FitStatistics(self.n, self.likelihood.statistics(h, self.y), torch.stack(gradients))

    # --- the prior ----------------------------------------------------------------------------------

    def pull(self, theta: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """P₀ (θ − m₀)."""
        return self.prior.P0.diagonal * (theta - self.prior.mean)

    def scatter(self, theta: Float[Tensor, " p"]) -> Scalar:
        """(θ − m₀)ᵀ P₀ (θ − m₀)."""
        return (theta - self.prior.mean) @ self.pull(theta)

    @cached_property
    def kernel(self) -> Float[Tensor, "mc mc"]:
        """J P₀⁻¹ Jᵀ: the prior's covariance of the outputs."""
        half = self.rows * self.prior.P0.diagonal.rsqrt()
        return half @ half.T

    # --- rows ---------------------------------------------------------------------------------------

    def pieces(self, floats: int = _PIECE_FLOATS) -> Iterator[slice]:
        """Some terms at a time, of so many numbers."""
        m, c = self.f.shape
        step = max(1, floats // (c * self.p))
        return (slice(start, min(start + step, m)) for start in range(0, m, step))

    def turned(self, S: Float[Tensor, "m c k"], some: slice) -> Float[Tensor, "mk p"]:
        """SᵀJ of some terms."""
        return (S[some].mT @ self.J[some]).reshape(-1, self.p)


def as_rows(M: Float[Tensor, "n c p"]) -> Jacobian:
    """A plain array as rows that the operators can contract."""
    n, c, p = M.shape
    return Jacobian((DenseBlock(slice(0, p), M),), n, c, p, M.device)


def gathered(posterior: Posterior, source: Source) -> LinearModel:
    """One pass: f, J and y of all data, term by term. Ranks send each other theirs, and all have the same model."""
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
    linearised, n = posterior.linearised, posterior.n_data
    k, p, device = linearised.k, linearised.layout.p, linearised.network.device
    f = torch.empty(n, k, dtype=torch.float64, device=device)
    J = torch.empty(n, k, p, dtype=torch.float64, device=device)
    targets, seen = [], 0
    for outputs, rows, y in _batches(posterior, source):
        some = slice(seen, seen + len(y))
        seen += len(y)
        if seen <= n:
            f[some], J[some] = outputs, rows
            targets.append(y)
    check_number(seen, n)
    return f, J, torch.cat(targets), slice(0, n)


def _over_ranks(posterior: Posterior, source: Source) -> tuple[Tensor, Tensor, Tensor, slice]:
    own = list(_batches(posterior, source))
    numbers = distributed.gathered(sum(len(y) for *_, y in own))
    check_number(sum(numbers), posterior.n_data)
    together = [rows for of_rank in distributed.gathered(own) for rows in of_rank]
    before = sum(numbers[: distributed.rank()])
    f, J, y = (torch.cat(column) for column in zip(*together, strict=True))
    return f, J, y, slice(before, before + numbers[distributed.rank()])


def _batches(posterior: Posterior, source: Source) -> Iterator[Rows]:
    """f and J in float64, the outputs of one term side by side."""
    linearised, sites = posterior.linearised, posterior.sites
    order = sites.split(torch.arange(linearised.k, device=linearised.network.device)[None])[0].flatten()
    for number, (x, y) in enumerate(source()):
        with located(f"batch {number}"), linearised.trace(x) as trace:
            yield trace.outputs.double()[:, order], trace.jacobian().dense()[:, order].double(), y


def check_number(seen: int, n: int) -> None:
    """A refined posterior is of the data it was fitted on."""
    if seen != n:
        raise InputError(
            f"refine got {seen} data, but the posterior was fitted on {n}. Pass the training data: all of them, once."
        )
