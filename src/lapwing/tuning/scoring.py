"""The held-out NLL of a Gaussian over outputs, at its best temperature or noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from math import exp, inf, log, pi
from typing import Any

import torch

from lapwing import predictive
from lapwing._types import Tensor
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Sites
from lapwing.predictive import Frame, SiteGaussian, links
from lapwing.predictive.link_rules import DEFAULT, PAIRWISE, PROBIT, Link
from lapwing.sampling import seeded

N_DRAWS = 256  # of the outputs, where an average takes draws: differences matter here, not the last digits


@dataclass(frozen=True, eq=False)
class Targets:
    """Held-out targets as given, and how the outputs split into likelihood terms."""

    y: Any
    sites: Sites
    n_terms: int


@dataclass(frozen=True)
class Freedom:
    """What may vary, and what it costs: whether the noise is free, and a weak prior on log T."""

    noise: bool
    colder: float  # standard deviation of log T below one; inf: free
    warmer: float  # and above

    def cost(self, T: float) -> float:
        return 0.5 * (log(T) / (self.colder if T < 1 else self.warmer)) ** 2


@dataclass(frozen=True)
class Score:
    """NLL per likelihood term, and what was free: T for classes, the factor of the noise variance for a Gaussian."""

    nll: float
    dispersion: float
    link: Link
    cost: float = 0.0  # nats by which all terms together must gain before this temperature is preferred


@singledispatch
def quick_scores(likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    """One score per link that costs no draws; other likelihoods have nothing to choose."""
    frame = Frame(targets.sites, torch.float64, DEFAULT, N_DRAWS, seeded(None))
    prediction = predictive.from_gaussian(likelihood, gaussian, frame)
    return [Score(-float(prediction.log_prob(targets.y).mean()), 1.0, DEFAULT)]


@singledispatch
def final_score(
    likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, T: float
) -> Score | None:
    """The default link, which is exact but dear, near a temperature that did well with a quick one."""
    return None


# --- Gaussian ------------------------------------------------------------------------------------------------


@quick_scores.register
def _(likelihood: Gaussian, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    """Noise D and covariance V, both times a:  NLL = ½ (log det 2πa(D + V) + rᵀ(D + V)⁻¹r / a), with the best a."""
    r = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean) - gaussian.mean
    noise = torch.diag_embed(likelihood.resolved().detach().square().to(r).expand(r.shape))
    L, info = torch.linalg.cholesky_ex(noise + (gaussian.cov + gaussian.cov.mT) / 2)
    if bool(info.any()):  # a prior so wide that the covariance has lost its digits is no candidate
        return [Score(inf, 1.0, DEFAULT)]
    quadratic = float((torch.linalg.solve_triangular(L, r[..., None], upper=False) ** 2).sum())
    a = quadratic / r.numel() if freedom.noise else 1.0
    log_det = float(2 * L.diagonal(dim1=-2, dim2=-1).log().sum())
    terms = r.numel() // r.shape[-1]
    return [Score(0.5 * (r.numel() * log(2 * pi * a) + log_det + quadratic / a) / terms, a, DEFAULT)]


# --- classes ---------------------------------------------------------------------------------------------------

_LOG_T = torch.linspace(-1.8, 2.4, 22, dtype=torch.float64)  # 0.17 … 11, with T = 1 among them


@quick_scores.register
def _(likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    none = gaussian.mean[None]  # closed forms take no draws
    return [
        _best_temperature(_categorical_nll(likelihood, gaussian, targets, link, none), link, freedom, targets.n_terms)
        for link in (PAIRWISE, PROBIT)
    ]


@final_score.register
def _(likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, T: float) -> Score:
    draws = links.gaussian_draws(gaussian.mean, gaussian.cov, N_DRAWS, generator=seeded(None))
    return _near(_categorical_nll(likelihood, gaussian, targets, DEFAULT, draws), T, freedom, targets.n_terms)


def _categorical_nll(
    likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, link: Link, draws: Tensor
) -> Callable[[float], float]:
    labels = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean.device)
    counted = labels != likelihood.ignore_index
    index = torch.where(counted, labels, 0)[..., None]

    def nll(T: float) -> float:
        at = gaussian.tempered(T)
        log_p = link.categorical(at.mean, at.cov, draws / T).gather(-1, index)[..., 0]
        return -float(torch.where(counted, log_p, 0.0).mean())

    return nll


@quick_scores.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    nll = _bernoulli_nll(likelihood, gaussian, targets, PROBIT)
    return [_best_temperature(nll, PROBIT, freedom, targets.n_terms)]


@final_score.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, T: float) -> Score:
    return _near(_bernoulli_nll(likelihood, gaussian, targets, DEFAULT), T, freedom, targets.n_terms)


def _bernoulli_nll(
    likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, link: Link
) -> Callable[[float], float]:
    y = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean)

    def nll(T: float) -> float:
        at = gaussian.tempered(T)
        var = at.cov.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        one, zero = link.binary(at.mean, var, n_draws=N_DRAWS, generator=seeded(None))
        return -float((y * one + (1 - y) * zero).sum(-1).mean())

    return nll


def _best_temperature(nll: Callable[[float], float], link: Link, freedom: Freedom, n_terms: int) -> Score:
    """The best of a grid over log T, every third point first, and of the parabola through it and its neighbours."""

    def total(i: int) -> float:
        if i not in tried:
            tried[i] = _scored(nll, float(_LOG_T[i]), link, freedom)
        return tried[i].nll + tried[i].cost / n_terms

    tried: dict[int, Score] = {}
    last = len(_LOG_T) - 1
    near = min(range(0, last + 1, 3), key=total)
    i = min(range(max(0, near - 3), min(last, near + 3) + 1), key=total)
    if not 0 < i < last:
        return tried[i]
    around = [total(k) for k in (i - 1, i, i + 1)]
    refined = _scored(nll, _vertex(_LOG_T[i - 1 : i + 2].tolist(), around), link, freedom)
    return min(tried[i], refined, key=lambda score: score.nll + score.cost / n_terms)


def _near(nll: Callable[[float], float], T: float, freedom: Freedom, n_terms: int) -> Score:
    """The default link at T, one step of the grid to either side, and at the parabola through the three."""
    around = [log(T) + step for step in (-0.2, 0.0, 0.2)]
    tried = [_scored(nll, at, DEFAULT, freedom) for at in around]
    vertex = _vertex(around, [score.nll + score.cost / n_terms for score in tried])
    tried.append(_scored(nll, min(max(vertex, around[0] - 0.2), around[2] + 0.2), DEFAULT, freedom))
    return min(tried, key=lambda score: score.nll + score.cost / n_terms)


def _scored(nll: Callable[[float], float], log_T: float, link: Link, freedom: Freedom) -> Score:
    T = exp(log_T)
    return Score(nll(T), T, link, freedom.cost(T))


def _vertex(at: list[float], values: list[float]) -> float:
    """Where the parabola through three equidistant points is lowest; the middle one if it opens downwards."""
    bend = values[0] - 2 * values[1] + values[2]
    return at[1] if bend <= 0 else at[1] + 0.5 * (at[1] - at[0]) * (values[0] - values[2]) / bend
