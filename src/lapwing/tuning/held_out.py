"""What held-out data say of a candidate: its predictive NLL, from Gaussians over outputs computed once.

A posterior whose precisions are all multiplied by s has the outputs N(m, V_s). One pass over the held-out inputs gives
m, the linear mode's J (θ_* − θ*), and V_s for every s of a grid; temperature, noise, mean and link are then free to
vary without the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch

from lapwing import predictive
from lapwing._types import Float, Tensor
from lapwing.data import Batches
from lapwing.errors import located
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Sites
from lapwing.observations import encode_batch
from lapwing.posterior import Posterior
from lapwing.predictive import Frame, SiteGaussian, links, site_gaussian
from lapwing.predictive.link_rules import PAIRWISE, PROBIT, Default, Link
from lapwing.progress import shown
from lapwing.sampling import seeded

_N_DRAWS = 128  # of the outputs, when a candidate's NLL takes draws: the differences matter, not the last digits
_MOST_FLOATS = 1 << 27  # covariances kept: 1 GiB


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Means, mean shifts and covariances at the held-out inputs, for every scale of the prior."""

    mean: Float[Tensor, "n t c"]
    shift: Float[Tensor, "n t c"] | None  # J (θ_* − θ*)
    covs: Float[Tensor, "s n t c c"]
    y: Any  # the targets as given
    sites: Sites

    @classmethod
    def of(
        cls, posterior: Posterior, data: Batches, scales: Tensor, mode: Tensor | None, progress: bool | None
    ) -> HeldOut:
        """One pass over the held-out data. `mode` is θ_* − θ*, when there is a linear mode to choose."""
        precisions = [posterior.with_prior(_scaled(posterior, s)).precision for s in scales.tolist()]
        parts: list[tuple[Tensor, Tensor | None, Tensor, Any]] = []
        for number, (x, y) in enumerate(shown(data, total=len(data), what="held-out data", progress=progress)):
            with located(f"validation, batch {number}"):
                x, _ = encode_batch(x, y, posterior.likelihood, posterior.sites)  # refuses bad targets
                start = 0
                for f, J in posterior.weights.jacobians(x):
                    rows = slice(start, start + len(f))
                    start += len(f)
                    moved = None if mode is None else posterior.sites.split(J.mv(mode[None])[0].double())
                    covs = torch.stack([site_gaussian(P, f, J, posterior.sites).cov for P in precisions])
                    targets = tuple(v[rows] for v in y) if isinstance(y, tuple) else y[rows]
                    parts.append((posterior.sites.split(f), moved, covs, targets))
        means, shifts, covs_, ys = zip(*parts, strict=True)
        shift = None if mode is None else torch.cat([v for v in shifts if v is not None])
        return cls(torch.cat(means), shift, torch.cat(covs_, 1), _joined(ys), posterior.sites)

    def means(self) -> list[Float[Tensor, "n t c"]]:
        """The network's, and the linear mode's if there is one."""
        return [self.mean] if self.shift is None else [self.mean, self.mean + self.shift]


def _scaled(posterior: Posterior, s: float) -> Any:
    return posterior.prior.with_precisions(posterior.prior.precisions.detach() * s)


def _joined(ys: tuple[Any, ...]) -> Any:
    if isinstance(ys[0], tuple):
        return tuple(torch.cat(column) for column in zip(*ys, strict=True))
    return torch.cat(ys)


@dataclass(frozen=True)
class Score:
    """The best a candidate mean, scale and link can do, and the temperature or noise factor that does it."""

    nll: float
    dispersion: float = 1.0  # T for classes, the factor of the noise variance for a Gaussian


@singledispatch
def links_for(likelihood: Likelihood, c: int) -> list[Link]:
    return [Default()]


@links_for.register
def _(likelihood: Categorical, c: int) -> list[Link]:
    return [Default(), PAIRWISE, PROBIT]


@links_for.register
def _(likelihood: Bernoulli, c: int) -> list[Link]:
    return [Default(), PROBIT]


@singledispatch
def best_scores(
    likelihood: Likelihood, held_out: HeldOut, mean: Float[Tensor, "n t c"], link: Link, free: bool
) -> list[Score]:
    """One score per scale of the prior; any likelihood, nothing else to choose."""
    frame = Frame(held_out.sites, torch.float64, link, _N_DRAWS, seeded(None))
    predictions = [predictive.from_gaussian(likelihood, SiteGaussian(mean, cov), frame) for cov in held_out.covs]
    return [Score(-float(p.log_prob(held_out.y).mean())) for p in predictions]


@best_scores.register
def _(likelihood: Gaussian, held_out: HeldOut, mean: Tensor, link: Link, free: bool) -> list[Score]:
    """Noise D and covariance V, both times a:  NLL = ½ (log det 2πa(D + V) + rᵀ(D + V)⁻¹r / a), with the best a."""
    r = likelihood.encode(held_out.y, held_out.sites, len(mean)).to(mean) - mean
    noise = torch.diag_embed(likelihood.resolved().detach().square().to(mean).expand(r.shape))
    scores = []
    for cov in held_out.covs:
        L = torch.linalg.cholesky(noise + cov)
        quadratic = float((torch.linalg.solve_triangular(L, r[..., None], upper=False) ** 2).sum())
        a = quadratic / r.numel() if free else 1.0
        log_det = float(2 * L.diagonal(dim1=-2, dim2=-1).log().sum())
        spread = r.numel() * torch.tensor(2 * torch.pi * a, dtype=torch.float64).log()
        scores.append(Score(float(0.5 * (spread + log_det + quadratic / a)) / (r.numel() // r.shape[-1]), a))
    return scores


_LOG_T = torch.linspace(-2.4, 2.4, 25, dtype=torch.float64)  # 0.09 … 11, with T = 1 among them


@best_scores.register
def _(likelihood: Categorical, held_out: HeldOut, mean: Tensor, link: Link, free: bool) -> list[Score]:
    labels = likelihood.encode(held_out.y, held_out.sites, len(mean)).to(mean.device)
    counted = labels != likelihood.ignore_index
    index = torch.where(counted, labels, 0)[..., None]

    def nlls(cov: Tensor, draws: Tensor, T: float) -> float:
        log_p = link.categorical(mean / T, cov / T**2, draws / T).gather(-1, index)[..., 0]
        return -float(torch.where(counted, log_p, 0.0).mean())

    scores = []
    for cov in held_out.covs:
        draws = links.gaussian_draws(mean, cov, _N_DRAWS if link == Default() else 1, generator=seeded(None))
        scores.append(_best_temperature(lambda T, cov=cov, draws=draws: nlls(cov, draws, T)))
    return scores


@best_scores.register
def _(likelihood: Bernoulli, held_out: HeldOut, mean: Tensor, link: Link, free: bool) -> list[Score]:
    y = likelihood.encode(held_out.y, held_out.sites, len(mean)).to(mean)

    def nlls(var: Tensor, T: float) -> float:
        one, zero = link.binary(mean / T, var / T**2, n_draws=_N_DRAWS, generator=seeded(None))
        return -float((y * one + (1 - y) * zero).sum(-1).mean())

    variances = held_out.covs.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    return [_best_temperature(lambda T, var=var: nlls(var, T)) for var in variances]


def _best_temperature(nll: Any) -> Score:
    """The best of a grid over log T and of the parabola through its three best neighbours."""
    values = [nll(float(T)) for T in _LOG_T.exp()]
    i = min(range(len(values)), key=values.__getitem__)
    best = Score(values[i], float(_LOG_T[i].exp()))
    if not 0 < i < len(values) - 1:
        return best
    left, middle, right = values[i - 1 : i + 2]
    bend = left - 2 * middle + right
    vertex = float(_LOG_T[i]) + 0.5 * float(_LOG_T[1] - _LOG_T[0]) * (left - right) / bend if bend > 0 else 0.0
    T = float(torch.tensor(vertex).exp())
    refined = Score(nll(T), T)
    return refined if refined.nll < best.nll else best
