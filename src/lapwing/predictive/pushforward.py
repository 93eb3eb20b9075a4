"""Push the Gaussian over weights through the linearised network: a Gaussian over outputs.

f_lin ~ N(f + J (μ − θ*), J P⁻¹ Jᵀ). One function per shape of the result. All process the inputs in pieces, to keep
the rows of J in memory within a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from lapwing._types import Float, Tensor
from lapwing.data import ModelInput
from lapwing.likelihoods import Sites
from lapwing.linalg import joined
from lapwing.network.jacobian import Jacobian
from lapwing.network.linearised import Linearised
from lapwing.network.products import VECTORS_AT_ONCE, attached, choose_jvp
from lapwing.operators import Precision, SeparatePrecision

T = TypeVar("T")
MANY_OUTPUTS = 64  # outputs per datum above which the default averages draws of functions
FUNCTION_PAIRS = 16  # antithetic pairs f ± J (θ − θ*) in such an average
_MOVED_FLOATS = 1 << 25  # numbers in a forward pass with tangents
_TRACED_FLOATS = 1 << 24  # numbers in rows that are traced before they are compressed


@dataclass(frozen=True, eq=False)
class SiteGaussian:
    """Mean and covariance of the C outputs of each likelihood term."""

    mean: Float[Tensor, "n t c"]
    cov: Float[Tensor, "n t c c"]

    def tempered(self, temperature: float) -> SiteGaussian:
        """The Gaussian of f / T (temperature scaling)."""
        return SiteGaussian(self.mean / temperature, self.cov / temperature**2)


@dataclass(frozen=True, eq=False)
class WeightGaussian:
    """N(θ* + shift, P⁻¹) over the weights of a linearised network, and how many rows to process at a time."""

    linearised: Linearised
    precision: Precision
    rows_at_once: int
    shift: Float[Tensor, " p"] | None = None  # μ − θ*; None: the mean is θ*

    @property
    def by_rows(self) -> bool:
        """Whether draws need rows of J: each output has weights of its own, or rows are processed many at a time."""
        return self.precision.prefers_large_batches or not self.precision.has_weights

    @property
    def many_outputs(self) -> bool:
        """Whether draws of the linearised function take much less than rows of J: one product with J for all outputs.

        Nothing is pulled back through the network for an output layer alone, whose rows are therefore cheap.
        """
        return self.linearised.k > MANY_OUTPUTS and not self.linearised.only_last and not self.by_rows

    def moved(self, x: ModelInput, deviations: Float[Tensor, "s p"]) -> Iterator[Float[Tensor, "_ n k"]]:
        """f + J shift, then J v for each of the vectors, by Jacobian–vector products: no row of J is formed."""
        jvp = attached if x.attached else choose_jvp(self.linearised, x)
        # Memory of one datum: values and tangents of a forward pass, and the outputs for all vectors.
        kept, outputs = self.linearised.datum_floats, 2 * len(deviations) * self.linearised.k
        step = max(1, _MOVED_FLOATS // ((1 + VECTORS_AT_ONCE) * (kept or _MOVED_FLOATS // 256) + outputs))
        for start in range(0, x.n, step):
            piece = x if step >= x.n else x.rows(slice(start, start + step))
            with self.linearised.unrecorded(piece) as trace:
                f = trace.outputs.double()[None]
                vectors = deviations if self.shift is None else torch.cat([self.shift[None], deviations])
                found = jvp(trace, vectors)
                if self.shift is not None:
                    f, found = f + found[:1], found[1:]
                yield torch.cat([f, found])

    def jacobians(self, x: ModelInput) -> Iterator[tuple[Float[Tensor, "n k"], Jacobian]]:
        """(f, J) for successive pieces of x."""
        return (self._linearised_at(piece) for piece in self._pieces(x))

    def each(self, x: ModelInput, contract: Callable[[Float[Tensor, "n k"], Jacobian], T]) -> Iterator[T]:
        """contract(f, J) for successive pieces of x; each piece is freed before the next is computed."""
        return (contract(*self._linearised_at(piece)) for piece in self._pieces(x))

    def _pieces(self, x: ModelInput) -> Iterator[ModelInput]:
        step = max(1, self.rows_at_once // self.linearised.k)
        for start in range(0, x.n, step):
            yield x if step >= x.n else x.rows(slice(start, start + step))

    def _linearised_at(self, x: ModelInput) -> tuple[Float[Tensor, "n k"], Jacobian]:
        f, J = self._gathered(x) if self.precision.prefers_large_batches else self._traced(x)
        if self.shift is not None:
            f = f + J.mv(self.shift[None])[0].double()
        return f, J

    def _traced(self, x: ModelInput) -> tuple[Float[Tensor, "n k"], Jacobian]:
        with self.linearised.trace(x) as trace:
            return trace.outputs.double(), trace.jacobian()

    def _gathered(self, x: ModelInput) -> tuple[Float[Tensor, "n k"], Jacobian]:
        """The same, traced a few inputs at a time; the rows of each are stored in their smallest form, then
        concatenated."""
        step = max(1, _TRACED_FLOATS // (self.linearised.k * self.linearised.sizes.factored))
        if step >= x.n:
            f, J = self._traced(x)
            return f, J.kept()
        pieces = [self._gathered(x.rows(slice(start, start + step))) for start in range(0, x.n, step)]
        return torch.cat([f for f, _ in pieces]), pieces[0][1].concatenated([J for _, J in pieces[1:]])


def mean_outputs(weights: WeightGaussian, x: ModelInput) -> Float[Tensor, "n k"]:
    """f + J (μ − θ*) (n, k); the network's outputs if the mean was not moved."""
    if weights.shift is None:
        return weights.linearised.outputs(x)
    return joined(weights.each(x, lambda f, _: f))


def pushforward(weights: WeightGaussian, x: ModelInput) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k k"]]:
    """Mean (n, k) and covariance (n, k, k) of all outputs of each datum: f + J (μ − θ*), J P⁻¹ Jᵀ."""
    means, cov, start = [], None, 0
    for f, piece in weights.each(x, lambda f, J: (f, weights.precision.inv_quad(J))):
        if len(f) == x.n:
            return f, piece
        # Fill one array: a list of pieces and its concatenation would take twice the memory.
        cov = piece.new_empty(x.n, *piece.shape[1:]) if cov is None else cov
        cov[start : start + len(f)] = piece
        means.append(f)
        start += len(f)
    assert cov is not None  # there is at least one input
    return torch.cat(means), cov


def pushforward_marginal(weights: WeightGaussian, x: ModelInput) -> Float[Tensor, "n k"]:
    """Variances diag(J P⁻¹ Jᵀ) only (n, k); no covariance is formed."""
    return joined(weights.each(x, lambda _, J: weights.precision.inv_quad_diagonal(J)))


def pushforward_sites(weights: WeightGaussian, x: ModelInput, sites: Sites) -> SiteGaussian:
    """Mean and covariance within each likelihood term; covariances between the terms of a datum are not computed."""
    pieces = list(weights.each(x, lambda f, J: site_gaussian(weights.precision, f, J, sites)))
    return SiteGaussian(joined(p.mean for p in pieces), joined(p.cov for p in pieces))


def site_gaussian(precision: Precision, f: Float[Tensor, "n k"], J: Jacobian, sites: Sites) -> SiteGaussian:
    """The same for one piece with a given Jacobian."""
    if sites.t == 1:
        return SiteGaussian(sites.split(f), precision.inv_quad(J)[:, None])
    positions = sites.split(torch.arange(f.shape[1])[None])[0]
    covs = [precision.inv_quad(J.outputs_at(rows)) for rows in positions.to(f.device)]
    return SiteGaussian(sites.split(f), torch.stack(covs, dim=1))


def pushforward_joint(weights: WeightGaussian, x: ModelInput) -> tuple[Float[Tensor, " nk"], Float[Tensor, "nk nk"]]:
    """Mean (nk,) and covariance (nk, nk) across all inputs and outputs."""
    pieces = list(weights.jacobians(x))
    J = pieces[0][1].concatenated([J for _, J in pieces[1:]])
    return torch.cat([f for f, _ in pieces]).flatten(), weights.precision.inv_gram(J)


def linear_draws(weights: WeightGaussian, x: ModelInput, deviations: Float[Tensor, "s ..."]) -> Float[Tensor, "s n k"]:
    """f + J (θ_s − θ*) for given draws of the weights (s, p), or of the weights of every output (s, c, p).

    By Jacobian–vector products if there are fewer draws than outputs, else by rows of J.
    """
    P = weights.precision
    if not weights.by_rows and len(deviations) < weights.linearised.k:
        return torch.cat([moved[:1] + moved[1:] for moved in weights.moved(x, deviations)], dim=1)

    def move(J: Jacobian) -> Float[Tensor, "s n k"]:
        return P.moved(J, deviations) if isinstance(P, SeparatePrecision) else J.mv(deviations)

    return torch.cat(list(weights.each(x, lambda f, J: f + move(J))), dim=1)


def antithetic_draws(
    weights: WeightGaussian, x: ModelInput, deviations: Float[Tensor, "s p"]
) -> Float[Tensor, "pairs n k"]:
    """f ± J (θ_s − θ*): 2 S draws in antithetic pairs, whose mean is exactly the Gaussian's."""
    pieces = [torch.cat([m[:1] + m[1:], m[:1] - m[1:]]) for m in weights.moved(x, deviations)]
    return torch.cat(pieces, dim=1)
