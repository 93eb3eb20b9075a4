"""The Gaussians over outputs at held-out inputs, for every candidate prior: one pass, then no network any more.

A posterior whose precisions are all multiplied by s has the outputs N(m, V_s) around one of these means m:

    the network's                    f
    on the way to the linear mode    f + α J (θ_* − θ*),  α = ½ and 1
    one Newton step of the data      f + J P_s⁻¹ ∇ log p(D | θ*): the mode of a prior centred on the network
    one Newton step of the posterior f + α J P_s⁻¹ (∇ log p(D | θ*) − s P₀ (θ* − m₀)),  α = ¼, ½ and 1

The step of the data tends to the network as s grows, the others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lapwing import ranks
from lapwing._types import Float, Tensor
from lapwing.data import Batches
from lapwing.errors import InputError, located
from lapwing.likelihoods import Sites
from lapwing.observations import encode_batch
from lapwing.posterior import Posterior
from lapwing.predictive import SiteGaussian, site_gaussian
from lapwing.progress import shown

_MOST_COVARIANCES = 1 << 29  # numbers: 4 GiB


@dataclass(frozen=True, eq=False)
class Shift:
    """Means along one way: their names with how far each goes, and θ − θ* at every scale (S, P) or at all (1, P)."""

    lengths: dict[str, float]
    weights: Float[Tensor, "s p"]

    def weights_of(self, name: str, scale_index: int) -> Float[Tensor, " p"]:
        return self.lengths[name] * self.weights[min(scale_index, len(self.weights) - 1)]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Means and covariances at the held-out inputs, for every scale of the prior."""

    f: Float[Tensor, "n t c"]
    lengths: tuple[dict[str, float], ...]  # of every way, its means
    moves: tuple[Float[Tensor, "_ n t c"], ...]  # J (θ − θ*) along every way, at every scale or once
    covs: Float[Tensor, "s n t c c"]
    y: Any  # the targets as given
    sites: Sites

    @classmethod
    def of(
        cls, posterior: Posterior, data: Batches, scales: list[float], shifts: list[Shift], progress: bool | None
    ) -> HeldOut:
        """One pass over the held-out data."""
        precisions = [scaled(posterior, s).precision for s in scales]
        pieces, seen = [], 0
        for number, (x, y) in enumerate(shown(data, total=len(data), what="held-out data", progress=progress)):
            with located(f"validation, batch {number}"):
                x, _ = encode_batch(posterior.given(x), y, posterior.likelihood, posterior.sites)  # refuses bad targets
                start, seen = 0, seen + x.n
                _check_room(seen, len(precisions), posterior.sites)
                for f, J in posterior.weights.jacobians(x):
                    rows = slice(start, start + len(f))
                    start += len(f)
                    moves = [_by_site(J.mv(shift.weights).double(), posterior.sites) for shift in shifts]
                    covs = torch.stack([site_gaussian(P, f, J, posterior.sites).cov for P in precisions])
                    targets = tuple(v[rows] for v in y) if isinstance(y, tuple) else y[rows]
                    pieces.append((posterior.sites.split(f), moves, covs, targets))
        pieces = [piece for each in ranks.gathered(pieces) for piece in each]  # held-out data are spread as well
        _check_room(sum(len(f) for f, *_ in pieces), len(precisions), posterior.sites)
        f_, moves_, covs_, ys = zip(*pieces, strict=True)
        joined = tuple(torch.cat(list(each), 1) for each in zip(*moves_, strict=True))
        lengths = tuple(shift.lengths for shift in shifts)
        return cls(torch.cat(f_), lengths, joined, torch.cat(covs_, 1), _joined(ys), posterior.sites)

    @property
    def means(self) -> list[str]:
        return ["network", *(name for lengths in self.lengths for name in lengths)]

    def gaussian(self, mean: str, scale_index: int) -> SiteGaussian:
        """The outputs around one of the means, under the prior at one of the scales."""
        for lengths, moves in zip(self.lengths, self.moves, strict=True):
            if mean in lengths:
                move = lengths[mean] * moves[min(scale_index, len(moves) - 1)]
                return SiteGaussian(self.f + move, self.covs[scale_index])
        return SiteGaussian(self.f, self.covs[scale_index])


def _check_room(n: int, n_scales: int, sites: Sites) -> None:
    """Covariances of all held-out data are kept, one per scale; refuse before the memory is gone."""
    each = n_scales * sites.t * sites.c**2
    if n * each > _MOST_COVARIANCES:
        raise InputError(
            f"{n} held-out data with {sites.t} × {sites.c} outputs each need {n_scales} covariances apiece, more than "
            f"the {_MOST_COVARIANCES * 8 >> 30} GiB kept for them. Give at most {_MOST_COVARIANCES // each} held-out "
            "data, or tune by the evidence alone."
        )


def scaled(posterior: Posterior, s: float) -> Posterior:
    """All precisions times s."""
    return posterior.with_prior(posterior.prior.with_precisions(posterior.prior.precisions.detach() * s))


def _by_site(moved: Float[Tensor, "s n k"], sites: Sites) -> Float[Tensor, "s n t c"]:
    return torch.stack([sites.split(each) for each in moved])


def _joined(ys: tuple[Any, ...]) -> Any:
    if isinstance(ys[0], tuple):
        return tuple(torch.cat(column) for column in zip(*ys, strict=True))
    return torch.cat(ys)
