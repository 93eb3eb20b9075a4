"""The Gaussians over outputs at held-out inputs, for every candidate prior: one pass over them.

A posterior whose precisions are all multiplied by s has the outputs N(m, V_s) around one of these means m:

    the network's                    f
    on the way to the linear mode    f + α J (θ_* − θ*),  α = ½ and 1
    one Newton step of the data      f + J P_s⁻¹ ∇ log p(D | θ*): the mode of a prior centred on the network
    one Newton step of the posterior f + α J P_s⁻¹ (∇ log p(D | θ*) − s P₀ (θ* − m₀)),  α = ¼, ½ and 1

The step of the data tends to the network as s grows, the others do not. Jacobians are computed and rotated once, for
all scales; some hundred inputs are enough to compare the scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lapwing import ranks
from lapwing._types import Float, Tensor
from lapwing.data import Batches, ModelInput
from lapwing.errors import located
from lapwing.jacobian import Jacobian
from lapwing.likelihoods import Sites
from lapwing.observations import encode_batch
from lapwing.operators import Precision, inv_quads
from lapwing.posterior import Posterior
from lapwing.predictive import SiteGaussian
from lapwing.progress import shown
from lapwing.tuning.scoring import Targets

MOST_COMPARED = 256  # held-out inputs with a covariance for every scale
_MOST_COVARIANCES = 1 << 25  # numbers: 256 MiB


@dataclass(frozen=True, eq=False)
class Shift:
    """Means along one way: their names with how far each goes, and θ − θ* at every scale (S, P) or at all (1, P)."""

    lengths: dict[str, float]
    weights: Float[Tensor, "s p"]

    def weights_of(self, name: str, scale_index: int) -> Float[Tensor, " p"]:
        return self.lengths[name] * self.weights[min(scale_index, len(self.weights) - 1)]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Means and covariances at some of the held-out inputs, for every scale of the prior."""

    f: Float[Tensor, "n t c"]
    lengths: tuple[dict[str, float], ...]  # of every way, its means
    moves: tuple[Float[Tensor, "_ n t c"], ...]  # J (θ − θ*) along every way, at every scale or once
    covs: Float[Tensor, "s n t c c"]
    y: Any  # the targets as given
    sites: Sites

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
        """One pass over the held-out data, of which at most so many are taken, spread evenly over the batches.

        Without precisions, of the network alone.
        """
        sites = posterior.sites
        pieces: list[_Piece] = []
        most = min(most, max(1, _MOST_COVARIANCES // (max(1, len(precisions)) * sites.t * sites.c**2)))
        for number, x, y in _some(posterior, data, -(-most // ranks.world()), progress):
            with located(f"validation, batch {number}"):
                pieces += list(_of_batch(posterior, x, y, precisions, shifts))
        pieces = [piece for each in ranks.gathered(pieces) for piece in each]  # held-out data are spread as well
        f_, moves_, covs_, ys = zip(*pieces, strict=True)
        joined = tuple(torch.cat(list(each), 1) for each in zip(*moves_, strict=True))
        lengths = tuple(shift.lengths for shift in shifts)
        return cls(torch.cat(f_), lengths, joined, torch.cat(covs_, 1), _joined(ys), sites)

    @property
    def means(self) -> list[str]:
        return ["network", *(name for lengths in self.lengths for name in lengths)]

    @property
    def targets(self) -> Targets:
        return Targets(self.y, self.sites, self.n_terms)

    @property
    def n_terms(self) -> int:
        return len(self.f) * self.sites.t

    @property
    def alone(self) -> SiteGaussian:
        """The network's outputs, without a covariance."""
        return SiteGaussian(self.f, self.f.new_zeros(*self.f.shape, self.f.shape[-1]))

    def gaussian(self, mean: str, scale_index: int) -> SiteGaussian:
        """The outputs around one of the means, under the prior at one of the scales."""
        for lengths, moves in zip(self.lengths, self.moves, strict=True):
            if mean in lengths:
                move = lengths[mean] * moves[min(scale_index, len(moves) - 1)]
                return SiteGaussian(self.f + move, self.covs[scale_index])
        return SiteGaussian(self.f, self.covs[scale_index])


_Piece = tuple[Tensor, list[Tensor], Tensor, Any]  # f, moves, covariances, and targets as given


def _of_batch(
    posterior: Posterior, x: ModelInput, y: Any, precisions: list[Precision], shifts: list[Shift]
) -> Iterator[_Piece]:
    sites, start = posterior.sites, 0
    if not precisions:  # the network alone
        f = sites.split(posterior.linearised.outputs(x).double())
        yield f, [], f.new_zeros(1, *f.shape, f.shape[-1]), y
        return
    for f, J in posterior.weights.jacobians(x):
        rows = slice(start, start + len(f))
        start += len(f)
        moves = [_by_site(J.mv(shift.weights).double(), sites) for shift in shifts]
        yield sites.split(f), moves, _covariances(precisions, J, sites), _at(y, rows)


def _some(
    posterior: Posterior, data: Batches, most: int, progress: bool | None
) -> Iterator[tuple[int, ModelInput, Any]]:
    """The first inputs of every batch, as many of each; all of them are checked."""
    n_batches, left = len(data), most
    for number, (x, y) in enumerate(shown(data, total=n_batches, what="held-out data", progress=progress)):
        with located(f"validation, batch {number}"):
            x, _ = encode_batch(posterior.given(x), y, posterior.likelihood, posterior.sites)  # refuses bad targets
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
    """All precisions times s."""
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
