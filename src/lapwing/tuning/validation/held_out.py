"""Gaussians over outputs at held-out inputs, for every candidate prior, in one pass over the inputs.

With all precisions multiplied by s, a posterior has outputs N(m, V_s) with one of these means m:

    the network's                         f
    towards the linear model's mode       f + α J (θ_* − θ*),  α = ½ and 1
    a Newton step of the log likelihood   f + J P_s⁻¹ ∇ log p(D | θ*): the mode for a prior centred at the network
    a Newton step of the log posterior    f + α J P_s⁻¹ (∇ log p(D | θ*) − s P₀ (θ* − m₀)),  α = ¼, ½ and 1

The step of the log likelihood tends to the network as s grows, the others do not. Jacobians are computed and rotated
once for all scales. A few hundred inputs are enough to compare the scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lapwing._types import Float, Tensor
from lapwing.data import Batches, ModelInput
from lapwing.data.targets import encode_batch, padded_labels
from lapwing.errors import located
from lapwing.likelihoods import Likelihood, Sites
from lapwing.network.jacobian import Jacobian
from lapwing.operators import Precision, inv_quads
from lapwing.posterior import Posterior
from lapwing.predictive import SiteGaussian
from lapwing.runtime import distributed
from lapwing.runtime.progress import shown
from lapwing.tuning.validation.scoring import Targets
from lapwing.tuning.validation.some_outputs import MOST_CLASSES, MOST_SITES, chosen, reduced

MOST_COMPARED = 256  # held-out inputs for which the covariance at every scale is computed
_MOST_COVARIANCES = 1 << 25  # numbers in these covariances: 256 MiB


@dataclass(frozen=True, eq=False)
class Shift:
    """Means along one direction: their names and lengths, and θ − θ* for every scale (S, p) or for all (1, p)."""

    lengths: dict[str, float]
    weights: Float[Tensor, "s p"]

    def weights_of(self, name: str, scale_index: int) -> Float[Tensor, " p"]:
        return self.lengths[name] * self.weights[min(scale_index, len(self.weights) - 1)]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Means and covariances at some of the held-out inputs, for every scale of the prior."""

    f: Float[Tensor, "n t c"]
    lengths: tuple[dict[str, float], ...]  # names and lengths of the means, per direction
    moves: tuple[Float[Tensor, "_ n t c"], ...]  # J (θ − θ*) per direction, for every scale or once
    covs: Float[Tensor, "s n t c c"]
    rest: Float[Tensor, "n t r"]  # logits of classes whose covariance is not computed
    y: Any  # the targets as given
    sites: Sites
    likelihood: Likelihood  # for targets in this form

    @classmethod
    def of(
        cls,
        posterior: Posterior,
        data: Batches,
        precisions: list[Precision],
        shifts: list[Shift],
        most: int,
        progress: bool | None,
    ) -> HeldOut:
        """One pass over the held-out data, using at most `most` of them, spread evenly over the batches.

        Without precisions, for the network alone.
        """
        sites, likelihood, n_terms = posterior.sites, posterior.likelihood, 0
        if posterior.averages_functions:  # fewer likelihood terms per datum if there are many data
            n_terms = min(MOST_SITES, max(1, round(most / _expected_number(data, most))))
            sites, likelihood = Sites((n_terms, MOST_CLASSES)), reduced(likelihood)
        pieces: list[_Piece] = []
        most = min(most, max(1, _MOST_COVARIANCES // (max(1, len(precisions)) * sites.t * sites.c**2)))
        for number, x, y in _some(posterior, data, -(-most // distributed.world_size()), progress):
            y = padded_labels(y, posterior.likelihood, posterior.sites)
            with located(f"validation, batch {number}"):
                of_these = _of_some_outputs if n_terms else _of_batch
                pieces += list(of_these(posterior, x, y, precisions, shifts, n_terms))
        # Held-out data are sharded over ranks as well.
        pieces = [piece for each in distributed.gathered(pieces) for piece in each]
        f_, moves_, covs_, rest, ys = zip(*pieces, strict=True)
        joined = tuple(torch.cat(list(each), 1) for each in zip(*moves_, strict=True))
        lengths, f = tuple(shift.lengths for shift in shifts), torch.cat(f_)
        sites = Sites(tuple(f.shape[1:])) if n_terms else sites
        return cls(f, lengths, joined, torch.cat(covs_, 1), torch.cat(rest), _joined(ys), sites, likelihood)

    @property
    def means(self) -> list[str]:
        return ["network", *(name for lengths in self.lengths for name in lengths)]

    @property
    def targets(self) -> Targets:
        return Targets(self.y, self.sites, self.n_terms, self.rest)

    @property
    def n_terms(self) -> int:
        return len(self.f) * self.sites.t

    @property
    def alone(self) -> SiteGaussian:
        """The network's outputs with zero covariance."""
        return SiteGaussian(self.f, self.f.new_zeros(*self.f.shape, self.f.shape[-1]))

    def gaussian(self, mean: str, scale_index: int) -> SiteGaussian:
        """The Gaussian over outputs with one of the means, under the prior at one of the scales."""
        for lengths, moves in zip(self.lengths, self.moves, strict=True):
            if mean in lengths:
                move = lengths[mean] * moves[min(scale_index, len(moves) - 1)]
                return SiteGaussian(self.f + move, self.covs[scale_index])
        return SiteGaussian(self.f, self.covs[scale_index])


_Piece = tuple[Tensor, list[Tensor], Tensor, Tensor, Any]  # f, moves, covariances, the rest, and targets


def _of_batch(
    posterior: Posterior, x: ModelInput, y: Any, precisions: list[Precision], shifts: list[Shift], _: int
) -> Iterator[_Piece]:
    sites, start = posterior.sites, 0
    if not precisions:  # the network alone
        f = sites.split(posterior.linearised.outputs(x).double())
        yield f, [], _no_covariance(f), f[..., :0], y
        return
    for f, J in posterior.weights.jacobians(x):
        rows = slice(start, start + len(f))
        start += len(f)
        moves = [_by_site(J.mv(shift.weights).double(), sites) for shift in shifts]
        yield sites.split(f), moves, _covariances(precisions, J, sites), sites.split(f)[..., :0], _at(y, rows)


def _of_some_outputs(
    posterior: Posterior, x: ModelInput, y: Any, precisions: list[Precision], shifts: list[Shift], n_terms: int
) -> Iterator[_Piece]:
    """The same at some outputs of each datum; only the network's mean is available."""
    f = posterior.linearised.outputs(x).double()
    all_of_them = chosen(posterior.likelihood, f, y, posterior.sites, n_terms)
    if not precisions:
        some, rest = all_of_them.of(f)
        yield some, [], _no_covariance(some), rest, all_of_them.y
        return
    row_floats, columns = posterior.linearised.sizes.factored + f.shape[1], all_of_them.index[0].numel()
    step = max(1, posterior.chunk_floats // (row_floats * columns))
    for start in range(0, x.n, step):
        part = slice(start, start + step)
        these = all_of_them.data(part)
        with posterior.linearised.trace(x.rows(slice(start, min(start + step, x.n)))) as trace:
            some, rest = these.of(f[part])
            yield some, [], _covariances(precisions, these.rows(trace), these.sites), rest, these.y


def _no_covariance(f: Float[Tensor, "n t c"]) -> Float[Tensor, "1 n t c c"]:
    return f.new_zeros(1, *f.shape, f.shape[-1])


def _expected_number(data: Batches, most: int) -> int:
    """An estimate of how many data will be used."""
    n_batches = len(data)
    return min(most, data.first_on_any_rank()[0].n * n_batches * distributed.world_size()) if n_batches else most


def some_inputs(posterior: Posterior, data: Batches, most: int) -> Iterator[tuple[ModelInput, Any]]:
    """At most `most` of the held-out inputs with their targets, spread evenly over the batches."""
    return ((x, y) for _, x, y in _some(posterior, data, -(-most // distributed.world_size()), False))


def _some(
    posterior: Posterior, data: Batches, most: int, progress: bool | None
) -> Iterator[tuple[int, ModelInput, Any]]:
    """The first inputs of every batch, equally many of each. All batches are validated."""
    n_batches, left = len(data), most
    for number, (x, y) in enumerate(shown(data, total=n_batches, what="held-out data", progress=progress)):
        with located(f"validation, batch {number}"):
            # Raises for invalid targets.
            x, _ = encode_batch(posterior.given(x), y, posterior.likelihood, posterior.sites)
            share = -(-left // max(1, n_batches - number)) if n_batches else left
            n = min(x.n, share)
            left -= n
            if n:
                some = (x, y) if n == x.n else (x.rows(slice(0, n)), _at(y, slice(0, n)))
                yield number, *some


def _covariances(precisions: list[Precision], J: Jacobian, sites: Sites) -> Float[Tensor, "s n t c c"]:
    if sites.t == 1:
        return inv_quads(precisions, J)[:, :, None]
    positions = sites.split(torch.arange(sites.t * sites.c, device=J.device)[None])[0]
    return torch.stack([inv_quads(precisions, J.outputs_at(rows)) for rows in positions], dim=2)


def scaled(posterior: Posterior, s: float) -> Posterior:
    """The posterior with all precisions multiplied by s."""
    if s == 1.0:
        return posterior
    return posterior.with_prior(posterior.prior.with_precisions(posterior.prior.precisions.detach() * s))


def _by_site(moved: Float[Tensor, "s n k"], sites: Sites) -> Float[Tensor, "s n t c"]:
    return torch.stack([sites.split(each) for each in moved])


def _at(y: Any, rows: slice) -> Any:
    return tuple(v[rows] for v in y) if isinstance(y, tuple) else y[rows]


def _joined(ys: tuple[Any, ...]) -> Any:
    if isinstance(ys[0], tuple):
        return tuple(torch.cat(column) for column in zip(*ys, strict=True))
    return torch.cat(ys)
