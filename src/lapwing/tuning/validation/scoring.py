"""The held-out NLL of a Gaussian over outputs, at its best temperature or noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from math import exp, inf, log, pi
from typing import Any

import torch

from lapwing import predictive
from lapwing._types import Bool, Float, Int, Tensor
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Sites
from lapwing.predictive import Frame, SiteGaussian, links
from lapwing.predictive.link_rules import DEFAULT, PAIRWISE, PROBIT, Link
from lapwing.runtime.arguments import seeded

N_DRAWS = 64  # of the outputs, where an average takes draws: differences matter here, not the last digits


@dataclass(frozen=True, eq=False)
class Targets:
    """Held-out targets as given, and how the outputs split into likelihood terms."""

    y: Any
    sites: Sites
    n_terms: int
    rest: Float[Tensor, "n t r"] | None = None  # logits of further classes, which have no covariance


@dataclass(frozen=True)
class Freedom:
    """What may vary, and weak priors on it: on the log of the factor of a Gaussian's variances, and on log T."""

    noise: float  # standard deviation of the log factor, whose prior has exponential tails; 0: fixed
    colder: float  # standard deviation of log T below one; inf: free
    warmer: float  # and above

    def cost(self, T: float) -> float:
        return 0.5 * (log(T) / (self.colder if T < 1 else self.warmer)) ** 2

    def cost_of_factor(self, log_a: float) -> float:
        """½ z² for |z| ≤ 3, linear beyond, z = log a / s: a factor of ten is as likely as one of five."""
        z = abs(log_a) / self.noise
        return 0.5 * z**2 if z <= _NORMAL else _NORMAL * (z - 0.5 * _NORMAL)


@dataclass(frozen=True)
class Score:
    """NLL per likelihood term, and what was free: T for classes, the factor of the noise variance for a Gaussian."""

    nll: float
    dispersion: float
    link: Link
    cost: float = 0.0  # nats by which all terms together must gain before this temperature is preferred

    def total(self, n_terms: int) -> float:
        """With its share of the cost, per term."""
        return self.nll + self.cost / n_terms


@singledispatch
def quick_scores(likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    """One score per link that costs no draws; other likelihoods have nothing to choose."""
    frame = Frame(targets.sites, torch.float64, DEFAULT, N_DRAWS, seeded(None))
    prediction = predictive.from_gaussian(likelihood, gaussian, frame)
    return [Score(-float(prediction.log_prob(targets.y).mean()), 1.0, DEFAULT)]


@singledispatch
def final_scores(
    likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, near: Score
) -> list[Score]:
    """The default link, which is exact but expensive, and a quick one, near a temperature that did well with it."""
    return []


@singledispatch
def row_scores(likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, score: Score) -> Float[Tensor, " n"]:
    """Log probability of every likelihood term, at a score's temperature or noise and under its link."""
    frame = Frame(targets.sites, torch.float64, DEFAULT, N_DRAWS, seeded(None))
    return predictive.from_gaussian(likelihood, gaussian, frame).log_prob(targets.y).flatten()


_NORMAL = 3.0  # standard deviations within which the prior of the noise's factor is normal
_MOST_LOG_FACTOR = 40.0  # far beyond what the noise bounds allow

# --- Gaussian ------------------------------------------------------------------------------------------------


@quick_scores.register
def _(likelihood: Gaussian, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    """Noise D and covariance V, both times a:  NLL = ½ (log det 2πa(D + V) + rᵀ(D + V)⁻¹r / a), with the best a.

    The best under its prior: few data with one outlier among them would take it for noise.
    """
    r = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean) - gaussian.mean
    noise = torch.diag_embed(likelihood.resolved().detach().square().to(r).expand(r.shape))
    L, info = torch.linalg.cholesky_ex(noise + (gaussian.cov + gaussian.cov.mT) / 2)
    if bool(info.any()):  # a prior so wide that the covariance has lost its digits is no candidate
        return [Score(inf, 1.0, DEFAULT)]
    quadratics = (torch.linalg.solve_triangular(L, r[..., None], upper=False) ** 2).sum((-2, -1)).flatten()
    log_a = _as_far_as_sure(quadratics, r.shape[-1], freedom.noise) if freedom.noise else 0.0
    cost = freedom.cost_of_factor(log_a) if log_a else 0.0
    log_det = float(2 * L.diagonal(dim1=-2, dim2=-1).log().sum())
    scaled = r.numel() * (log(2 * pi) + log_a) + float(quadratics.sum()) * exp(-log_a)
    return [Score(0.5 * (scaled + log_det) / len(quadratics), exp(log_a), DEFAULT, cost)]


def _as_far_as_sure(quadratics: Float[Tensor, " n"], n_outputs: int, std: float) -> float:
    """The best ℓ, or so many quarters of it as gain most beyond the standard error of the gain.

    An outlier gains much by more noise, and is no reason to believe in it.
    """
    n, best = len(quadratics), _best_log_factor(float(quadratics.sum()), len(quadratics) * n_outputs, std)
    if n < 2:
        return 0.0
    log_a = best * torch.arange(5, dtype=torch.float64) / 4
    gains = -0.5 * (n_outputs * log_a[:, None] + torch.expm1(-log_a)[:, None] * quadratics)
    sure = gains.sum(1) - n**0.5 * gains.std(1)
    return float(log_a[int(sure.argmax())])


def _best_log_factor(quadratic: float, n: int, std: float) -> float:
    """The ℓ of least ½ (n ℓ + q e^{−ℓ}) plus its cost, which is convex, by bisection of the derivative."""
    low, high = -_MOST_LOG_FACTOR, _MOST_LOG_FACTOR
    for _ in range(60):
        log_a = 0.5 * (low + high)
        pull = max(-_NORMAL, min(_NORMAL, log_a / std)) / std
        rising = 0.5 * (n - quadratic * exp(-log_a)) + pull > 0
        low, high = (low, log_a) if rising else (log_a, high)
    return 0.5 * (low + high)


@row_scores.register
def _(likelihood: Gaussian, gaussian: SiteGaussian, targets: Targets, score: Score) -> Float[Tensor, " n"]:
    r = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean) - gaussian.mean
    noise = torch.diag_embed(likelihood.resolved().detach().square().to(r).expand(r.shape))
    V = score.dispersion * (noise + (gaussian.cov + gaussian.cov.mT) / 2)
    joint = torch.distributions.MultivariateNormal(torch.zeros_like(r), V, validate_args=False)
    return joint.log_prob(r).flatten()


# --- classes ---------------------------------------------------------------------------------------------------

_LOG_T = torch.linspace(-1.8, 2.4, 8, dtype=torch.float64)  # 0.17 … 11, with T = 1 among them
_NEAR = torch.tensor([-0.2, 0.0, 0.2], dtype=torch.float64)
_MOST_AT_ONCE = 1 << 22  # numbers of the covariances at several temperatures

Nll = Callable[[Tensor], Tensor]  # at temperatures (k,), per likelihood term


@dataclass(frozen=True, eq=False)
class Terms:
    """Log probabilities of all terms at temperatures (k,); called, their negative mean, some temperatures at a time."""

    log_p: Callable[[Tensor], Tensor]  # (k,) → (k, terms)
    floats: int  # that one temperature takes

    def __call__(self, T: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        at_once = max(1, _MOST_AT_ONCE // max(1, self.floats))
        return torch.cat([-self.log_p(part).mean(1) for part in T.split(at_once)])


@quick_scores.register
def _(likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    labels = _Labels.of(likelihood, gaussian, targets)
    return [_best_on(_LOG_T, labels.by_formula(link), link, freedom, targets.n_terms) for link in (PAIRWISE, PROBIT)]


@final_scores.register
def _(likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, near: Score) -> list[Score]:
    draws = links.gaussian_draws(gaussian.mean, gaussian.cov, N_DRAWS, generator=seeded(None))
    labels = _Labels.of(likelihood, gaussian, targets)
    return _near(near, labels.by_draws(draws), labels.by_formula(near.link), freedom, targets.n_terms)


@row_scores.register
def _(likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, score: Score) -> Float[Tensor, " n"]:
    labels, T = _Labels.of(likelihood, gaussian, targets), gaussian.mean.new_tensor([score.dispersion])
    if score.link != DEFAULT:
        return labels.by_formula(score.link).log_p(T)[0]
    draws = links.gaussian_draws(gaussian.mean, gaussian.cov, N_DRAWS, generator=seeded(None))
    return labels.by_draws(draws).log_p(T)[0]


@dataclass(frozen=True, eq=False)
class _Labels:
    """Where the observed classes are, the Gaussian over some logits, and the means of the rest.

    The rest is taken for classes like the others: f_j = m_j + common part + a part of its own, the common part being
    the mean deviation of the classes with a covariance V, the variance of its own v the mean difference of variance and
    covariance in V. Of many such classes the sum is log Σ_j exp(m_j / T) + v / 2T² + the common part.
    """

    gaussian: SiteGaussian
    index: Int[Tensor, "n t 1"]
    counted: Bool[Tensor, "n t"]
    rest: Float[Tensor, "n t r"]

    @classmethod
    def of(cls, likelihood: Categorical, gaussian: SiteGaussian, targets: Targets) -> _Labels:
        m = gaussian.mean
        labels = likelihood.encode(targets.y, targets.sites, len(m)).to(m.device)
        counted = labels != likelihood.ignore_index
        rest = m[..., :0] if targets.rest is None else targets.rest
        return cls(gaussian, torch.where(counted, labels, 0)[..., None], counted, rest)

    def by_formula(self, link: Link) -> Terms:
        """Under a closed form; one class more stands for the rest, which is good enough to order candidates."""

        def log_p(T: Float[Tensor, " k"]) -> Float[Tensor, "k n t"]:
            (m, cov), none = _tempered(self.gaussian, T), self.gaussian.mean[None]  # formulas take no draws
            if self.rest.shape[-1]:
                m = torch.cat([m, self._rest(T)[..., None]], -1)
                common = cov.mean(-1, keepdim=True)
                cov = torch.cat([cov, common], -1)
                cov = torch.cat([cov, cov.mean(-2, keepdim=True)], -2)
            return link.categorical(m, cov, none).gather(-1, self._expanded(T))[..., 0]

        return self._mean_of(log_p, self.gaussian.cov.numel())

    def by_draws(self, draws: Float[Tensor, "s n t c"]) -> Terms:
        """The default link: log of the mean of softmax(f_s / T) at the label."""
        at_label = draws.gather(-1, self.index.expand(len(draws), *self.index.shape))[..., 0]
        common = (draws - self.gaussian.mean).mean(-1)

        def log_p(T: Float[Tensor, " k"]) -> Float[Tensor, "k n t"]:
            beside = _beside(T, draws)
            total = torch.logsumexp(draws / beside[..., None], -1)  # (k, s, n, t)
            if self.rest.shape[-1]:
                total = torch.logaddexp(total, self._rest(T)[:, None] + common / beside)
            return torch.logsumexp(at_label / beside - total, 1) - log(len(draws))

        return self._mean_of(log_p, draws.numel())

    def _rest(self, T: Float[Tensor, " k"]) -> Float[Tensor, "k n t"]:
        """Without the common part."""
        beside, cov = _beside(T, self.rest), self.gaussian.cov
        c, variances = cov.shape[-1], cov.diagonal(dim1=-2, dim2=-1).sum(-1)
        own = (variances / c - (cov.sum((-2, -1)) - variances) / (c * (c - 1))).clamp(min=0)
        return torch.logsumexp(self.rest / beside, -1) + own / (2 * beside[..., 0] ** 2)

    def _expanded(self, T: Tensor) -> Int[Tensor, "k n t 1"]:
        return self.index.expand(len(T), *self.index.shape)

    def _mean_of(self, log_p: Callable[[Tensor], Tensor], floats: int) -> Terms:
        """Log probabilities of the labels that count; the others are zero."""
        return Terms(lambda T: torch.where(self.counted, log_p(T), 0.0).flatten(1), floats)


@quick_scores.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[Score]:
    nll = _bernoulli_terms(likelihood, gaussian, targets, PROBIT)
    return [_best_on(_LOG_T, nll, PROBIT, freedom, targets.n_terms)]


@final_scores.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, near: Score) -> list[Score]:
    exact, quick = (_bernoulli_terms(likelihood, gaussian, targets, link) for link in (DEFAULT, near.link))
    return _near(near, exact, quick, freedom, targets.n_terms)


def _bernoulli_terms(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, link: Link) -> Terms:
    y = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean)

    def log_p(T: Float[Tensor, " k"]) -> Float[Tensor, "k n"]:
        m, cov = _tempered(gaussian, T)
        var = cov.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        one, zero = link.binary(m, var, n_draws=N_DRAWS, generator=seeded(None))
        return (y * one + (1 - y) * zero).sum(-1).flatten(1)

    return Terms(log_p, gaussian.cov.numel() * (_NODES if link == DEFAULT else 1))


@row_scores.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, score: Score) -> Float[Tensor, " n"]:
    T = gaussian.mean.new_tensor([score.dispersion])
    return _bernoulli_terms(likelihood, gaussian, targets, score.link).log_p(T)[0]


_NODES = 200  # about: of the quadrature for one logit


def _beside(T: Float[Tensor, " k"], mean: Tensor) -> Float[Tensor, "k 1 1 1"]:
    """Temperatures along an axis of their own, in front of the data."""
    return T.to(mean)[:, None, None, None]


def _tempered(
    gaussian: SiteGaussian, T: Float[Tensor, " k"]
) -> tuple[Float[Tensor, "k n t c"], Float[Tensor, "k n t c c"]]:
    """Mean and covariance of f / T at every temperature."""
    beside = _beside(T, gaussian.mean)
    return gaussian.mean / beside, gaussian.cov / beside[..., None] ** 2


def _best_on(log_T: Float[Tensor, " k"], nll: Nll, link: Link, freedom: Freedom, n_terms: int) -> Score:
    """The best of equidistant temperatures, or what the parabola through it and its neighbours leads to."""
    tried = _scored(nll, log_T, link, freedom)
    i = min(range(len(tried)), key=lambda k: tried[k].total(n_terms))
    middle = min(max(i, 1), len(tried) - 2)
    around = [tried[k].total(n_terms) for k in (middle - 1, middle, middle + 1)]
    at = log_T[middle - 1 : middle + 2].tolist()
    vertex = min(max(_vertex(at, around), at[0]), at[2])
    return min([tried[i], *_scored(nll, log_T.new_tensor([vertex]), link, freedom)], key=lambda s: s.total(n_terms))


def _near(near: Score, exact: Nll, quick: Nll, freedom: Freedom, n_terms: int) -> list[Score]:
    """The exact link and the quick one, at temperatures around one that did well on a coarse grid."""
    log_T = log(near.dispersion) + _NEAR
    return [_best_on(log_T, nll, link, freedom, n_terms) for nll, link in ((exact, DEFAULT), (quick, near.link))]


def _scored(nll: Nll, log_T: Float[Tensor, " k"], link: Link, freedom: Freedom) -> list[Score]:
    T = log_T.double().exp()
    return [Score(value, t, link, freedom.cost(t)) for value, t in zip(nll(T).tolist(), T.tolist(), strict=True)]


def _vertex(at: list[float], values: list[float]) -> float:
    """Where the parabola through three equidistant points is lowest; the middle one if it opens downwards."""
    bend = values[0] - 2 * values[1] + values[2]
    return at[1] if not 0 < bend < inf else at[1] + 0.5 * (at[1] - at[0]) * (values[0] - values[2]) / bend
