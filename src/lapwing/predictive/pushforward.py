"""The Gaussian over weights pushed through the linearised network: a Gaussian over outputs.

f_lin ~ N(f + J (μ − θ*), J P⁻¹ Jᵀ). One function per shape of the answer; all work through the inputs in pieces, so
that the rows in memory stay within a budget.
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
from lapwing.network.products import VECTORS_AT_ONCE, choose_jvp
from lapwing.operators import Precision, SeparatePrecision

T = TypeVar("T")
MANY_OUTPUTS = 64  # per datum, above which draws of functions are averaged by default
FUNCTION_PAIRS = 16  # of functions f ± J (θ − θ*) that are then averaged
_MOVED_FLOATS = 1 << 25  # of a forward pass with tangents
_TRACED_FLOATS = 1 << 24  # of rows that are made before they are pressed together


@dataclass(frozen=True, eq=False)
class SiteGaussian:
    """Mean and covariance over the C outputs of each likelihood term."""

    mean: Float[Tensor, "n t c"]
    cov: Float[Tensor, "n t c c"]

    def tempered(self, temperature: float) -> SiteGaussian:
        """Of f / T."""
        return SiteGaussian(self.mean / temperature, self.cov / temperature**2)


@dataclass(frozen=True, eq=False)
class WeightGaussian:
    """N(θ* + shift, P⁻¹) over the weights of a linearised network, and how many inputs to take at a time."""

    linearised: Linearised
    precision: Precision
    rows_at_once: int
    shift: Float[Tensor, " p"] | None = None  # μ − θ*; None: the mean is θ*

    @property
    def by_rows(self) -> bool:
        """Whether only rows of J can be moved: every output has weights of its own, or rows come many at a time."""
        return self.precision.prefers_large_batches or not self.precision.has_weights

    @property
    def many_outputs(self) -> bool:
        """Whether draws of the linearised function take much less than rows of J: one product with J for all outputs.

        Nothing is pulled back through the network for an output layer alone, whose rows are therefore cheap.
        """
        return self.linearised.k > MANY_OUTPUTS and not self.linearised.only_last and not self.by_rows

    def moved(self, x: ModelInput, deviations: Float[Tensor, "s p"]) -> Iterator[Float[Tensor, "_ n k"]]:
        """f + J shift, and then J v for each of the vectors, by products with J: no row of it is formed."""
        jvp = choose_jvp(self.linearised, x)
        # Values and tangents of one forward pass, and the outputs of all vectors.
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
        """contract(f, J) for successive pieces of x; the rows of one are freed before those of the next are made."""
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
        """The same from a few inputs at a time, whose rows are pressed into the form that takes least memory."""
        step = max(1, _TRACED_FLOATS // (self.linearised.k * self.linearised.sizes.factored))
        if step >= x.n:
            f, J = self._traced(x)
            return f, J.kept()
        pieces = [self._gathered(x.rows(slice(start, start + step))) for start in range(0, x.n, step)]
        return torch.cat([f for f, _ in pieces]), pieces[0][1].concatenated([J for _, J in pieces[1:]])


def mean_outputs(weights: WeightGaussian, x: ModelInput) -> Float[Tensor, "n k"]:
    """f + J (μ − θ*); the network's own outputs when the mean was not moved."""
    if weights.shift is None:
        return weights.linearised.outputs(x)
    return joined(weights.each(x, lambda f, _: f))


def pushforward(weights: WeightGaussian, x: ModelInput) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k k"]]:
    """Mean and covariance over all K outputs of each datum."""
    means, cov, start = [], None, 0
    for f, piece in weights.each(x, lambda f, J: (f, weights.precision.inv_quad(J))):
        if len(f) == x.n:
            return f, piece
        # One array that is filled: the pieces and their concatenation would take twice as much.
        cov = piece.new_empty(x.n, *piece.shape[1:]) if cov is None else cov
        cov[start : start + len(f)] = piece
        means.append(f)
        start += len(f)
    assert cov is not None  # there is at least one input
    return torch.cat(means), cov


def pushforward_marginal(weights: WeightGaussian, x: ModelInput) -> Float[Tensor, "n k"]:
    """Variances only; no covariance is formed."""
    return joined(weights.each(x, lambda _, J: weights.precision.inv_quad_diagonal(J)))


def pushforward_sites(weights: WeightGaussian, x: ModelInput, sites: Sites) -> SiteGaussian:
    """Mean and covariance within each likelihood term; nothing between the terms of a datum."""
    pieces = list(weights.each(x, lambda f, J: site_gaussian(weights.precision, f, J, sites)))
    return SiteGaussian(joined(p.mean for p in pieces), joined(p.cov for p in pieces))


def site_gaussian(precision: Precision, f: Float[Tensor, "n k"], J: Jacobian, sites: Sites) -> SiteGaussian:
    """The same for one piece whose Jacobian is at hand."""
    if sites.t == 1:
        return SiteGaussian(sites.split(f), precision.inv_quad(J)[:, None])
    positions = sites.split(torch.arange(f.shape[1])[None])[0]
    covs = [precision.inv_quad(J.outputs_at(rows)) for rows in positions.to(f.device)]
    return SiteGaussian(sites.split(f), torch.stack(covs, dim=1))


def pushforward_joint(weights: WeightGaussian, x: ModelInput) -> tuple[Float[Tensor, " nk"], Float[Tensor, "nk nk"]]:
    """Mean and covariance across all inputs and outputs."""
    pieces = list(weights.jacobians(x))
    J = pieces[0][1].concatenated([J for _, J in pieces[1:]])
    return torch.cat([f for f, _ in pieces]).flatten(), weights.precision.inv_gram(J)


def linear_draws(weights: WeightGaussian, x: ModelInput, deviations: Float[Tensor, "s ..."]) -> Float[Tensor, "s n k"]:
    """f + J (θ_s − θ*) for given draws of the weights (s, P), or of those of every output (s, C, P).

    By products with J where there are fewer draws than outputs, else by its rows.
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
    """f ± J (θ_s − θ*): 2 S draws whose mean is the mean of the Gaussian exactly."""
    pieces = [torch.cat([m[:1] + m[1:], m[:1] - m[1:]]) for m in weights.moved(x, deviations)]
    return torch.cat(pieces, dim=1)
