"""Gaussian priors over the weights of an image network, and what they say of images.

Of a block of k × k filters, w ~ N(0, v C(ℓ)) with C_pq = exp(−‖p − q‖/ℓ); of any other weight, w ~ N(0, v). One
variance for all, if wanted; the g-prior has one variance, after every column of A J was scaled to a root mean square
of 1.

The covariance of images is a sum of fixed matrices,  J S_θ Jᵀ = Σ_k c_k(η) G_k,  whose coefficients are the only place
where the hyperparameters η (logarithms) enter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.errors import InputError, InputTypeError
from lapwing.imaging.blocks import Block
from lapwing.imaging.distances import NUGGET, Taps, class_grams, class_squares, taps
from lapwing.linalg import add_gram_, mirror_

Through = Callable[[Tensor], Tensor]
KINDS = ("blocks", "one", "g")
VARIANCE, LENGTH = "variance", "length_scale"
_SLAB = 1 << 21  # numbers of J that are worked on at a time
LOG_BOUNDS = {VARIANCE: (-6.9, 23.0), LENGTH: (-4.61, 4.61)}
_OF_ALL = (-23.0, 23.0)  # of a variance that all weights share


@dataclass(frozen=True, eq=False)
class ImagePrior:
    """Blocks of weights; `scale`, where there is one, multiplies the columns of J (the g-prior)."""

    kind: str
    blocks: tuple[Block, ...]
    p: int
    scale: Float[Tensor, " p"] | None = None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the hyperparameters, in the order of η."""
        return tuple(_named(b.name, what) for b in self.blocks for what in _kinds(b))

    @cached_property
    def bounds(self) -> tuple[Float[Tensor, " q"], Float[Tensor, " q"]]:
        """Of η. A block that the data would switch off keeps a variance of 0.001, as in the paper's code."""
        if self.kind != "blocks":
            return torch.tensor([_OF_ALL[0]], dtype=torch.float64), torch.tensor([_OF_ALL[1]], dtype=torch.float64)
        pairs = torch.tensor([LOG_BOUNDS[what] for b in self.blocks for what in _kinds(b)], dtype=torch.float64)
        return pairs[:, 0], pairs[:, 1]

    def start(self, variance: float, length: float) -> Float[Tensor, " q"]:
        values = [variance if what == VARIANCE else length for b in self.blocks for what in _kinds(b)]
        return torch.tensor(values, dtype=torch.float64).log()

    @property
    def grids(self) -> tuple[Taps, ...]:
        return tuple(taps(b.kernel) for b in self.blocks)

    @cached_property
    def classes(self) -> tuple[slice, ...]:
        """Each block's part of the coefficients."""
        ends = torch.tensor([len(g.distances) for g in self.grids]).cumsum(0).tolist()
        return tuple(slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True))

    def settings(self, eta: Float[Tensor, " q"]) -> list[tuple[Tensor, Tensor | None]]:
        """(log v, log ℓ or None) of each block."""
        values = iter(eta.unbind())
        return [(next(values), next(values) if b.has_length else None) for b in self.blocks]

    def coefficients(self, eta: Float[Tensor, " q"]) -> Float[Tensor, " k"]:
        """c(η): v exp(−r/ℓ), and the nugget where r = 0."""
        parts = []
        for (log_v, log_l), grid in zip(self.settings(eta), self.grids, strict=True):
            if log_l is None:
                parts.append(log_v.exp().reshape(1))
            else:
                nugget = NUGGET * (grid.distances == 0)
                parts.append(log_v.exp() * (torch.exp(-grid.distances * (-log_l).exp()) + nugget))
        return torch.cat(parts)

    def grams(self, rows: Float[Tensor, "n p"], through: Through = lambda J: J) -> Float[Tensor, "k m m"]:
        """G_k of some rows of J, or A G_k Aᵀ for `through` J ↦ A J: applied to the columns of one block at a time."""
        found = [class_grams(through(self._columns(b, rows)).unflatten(1, (-1, b.taps)), b.kernel) for b in self.blocks]
        return found[0] if len(found) == 1 else torch.cat(found)

    def squares(self, rows: Float[Tensor, "n p"]) -> Float[Tensor, "k n"]:
        """The diagonals of those matrices."""
        return torch.cat(
            [class_squares(self._columns(b, rows).unflatten(1, (-1, b.taps)), b.kernel) for b in self.blocks]
        )

    def covariance(self, eta: Float[Tensor, " q"], rows: Float[Tensor, "n p"]) -> Float[Tensor, "n n"]:
        """J S_θ Jᵀ, in float64: one symmetric product, where its terms G_k would take several."""
        total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        for b, (log_v, log_l), grid in zip(self.blocks, self.settings(eta), self.grids, strict=True):
            columns = self._columns(b, rows)
            root = None if log_l is None else torch.linalg.cholesky(grid.covariance(log_l.exp()))
            step = b.taps * max(1, _SLAB // (len(rows) * b.taps))
            for start in range(0, b.size, step):
                X = columns[:, start : start + step].double() * (0.5 * log_v).exp()
                X = X if root is None else (X.unflatten(1, (-1, b.taps)) @ root).flatten(1)
                add_gram_(total, X.T)
        return mirror_(total)

    def _columns(self, b: Block, rows: Float[Tensor, "n p"]) -> Float[Tensor, "n s"]:
        parts = [rows[:, s] if self.scale is None else rows[:, s] * self.scale[s].to(rows) for s in b.places]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def applied(self, eta: Float[Tensor, " q"], v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """S_θ v."""
        return self._mapped(eta, v, lambda C: C, lambda variance: variance, 2)

    def root(self, eta: Float[Tensor, " q"], v: Float[Tensor, "... p"]) -> Float[Tensor, "... p"]:
        """R v with R Rᵀ = S_θ: a draw from the prior, of standard normal v."""
        return self._mapped(eta, v, lambda C: torch.linalg.cholesky(C).T, lambda variance: variance.sqrt(), 1)

    def quadratic(self, eta: Float[Tensor, " q"], scatters: tuple[Tensor, ...]) -> Float[Tensor, ""]:
        """θᵀ S_θ⁻¹ θ out of the scatter matrices of θ."""
        total = eta.new_zeros(())
        for (log_v, log_l), grid, W in zip(self.settings(eta), self.grids, scatters, strict=True):
            if log_l is None:
                total = total + W.trace() / log_v.exp()
            else:
                total = total + torch.linalg.solve(grid.covariance(log_l.exp()), W).trace() / log_v.exp()
        return total

    def scatters(self, theta: Float[Tensor, " p"]) -> tuple[Tensor, ...]:
        """Σ_f w_f w_fᵀ of each block: all of θ that the quadratic form needs."""
        scaled = theta.double() if self.scale is None else theta.double() / self.scale
        return tuple(w.T @ w for w in (b.filters(scaled) for b in self.blocks))

    def _mapped(self, eta: Tensor, v: Tensor, of_taps: Any, of_variance: Any, power: int) -> Tensor:
        """Filters w → w M of every block, between the scales of the g-prior (once or twice)."""
        lead = v if self.scale is None or power == 1 else v * self.scale.to(v)
        out = torch.empty_like(lead)
        for b, (log_v, log_l), grid in zip(self.blocks, self.settings(eta), self.grids, strict=True):
            w = b.filters(lead) * of_variance(log_v.exp()).to(v)
            b.write_(out, w if log_l is None else w @ of_taps(grid.covariance(log_l.exp())).to(v))
        return out if self.scale is None else out * self.scale.to(v)

    def described(self, eta: Float[Tensor, " q"]) -> dict[str, float]:
        return dict(zip(self.names, eta.exp().tolist(), strict=True))

    def read(self, values: Any) -> Float[Tensor, " q"]:
        """η out of a mapping of hyperparameters."""
        if not isinstance(values, Mapping):
            raise InputTypeError(f"hyperparameters: expected a mapping, got {type(values).__name__}.")
        if set(values) != set(self.names):
            raise InputError(
                f"hyperparameters: expected {', '.join(self.names)}; got {', '.join(map(str, values)) or 'none'}."
            )
        eta = torch.tensor([float(values[name]) for name in self.names], dtype=torch.float64)
        if not bool(((eta > 0) & torch.isfinite(eta)).all()):
            raise InputError(f"hyperparameters: all must be positive and finite, got {dict(values)}.")
        return eta.log()


def _kinds(block: Block) -> tuple[str, ...]:
    return (VARIANCE, LENGTH) if block.has_length else (VARIANCE,)


def _named(block: str, what: str) -> str:
    return f"{block}.{what}" if block else what
