"""Held-out NLL of a Gaussian over outputs, at its best temperature or noise factor."""

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

N_DRAWS = 64  # draws of outputs; few, as candidates share them and only differences matter


@dataclass(frozen=True, eq=False)
class Targets:
    """Held-out targets, and how outputs split into likelihood terms."""

    y: Any
    sites: Sites
    n_terms: int
    rest: Float[Tensor, "n t r"] | None = None  # logits of classes whose covariance is not computed


@dataclass(frozen=True)
class Freedom:
    """Weak priors on what is optimised: the log factor of a Gaussian's variances, and log T."""

    noise: float  # scale of the log factor's prior, which has exponential tails; 0: fixed
    std_below: float  # standard deviation of log T for T < 1; inf: no prior
    std_above: float  # the same for T > 1

    def cost(self, T: float) -> float:
        return 0.5 * (log(T) / (self.std_below if T < 1 else self.std_above)) ** 2

    def cost_of_factor(self, log_a: float) -> float:
        """½ z² for |z| ≤ 3 and linear beyond, z = log a / s: large factors are not penalised much more than moderate
        ones."""
        z = abs(log_a) / self.noise
        return 0.5 * z**2 if z <= _NORMAL else _NORMAL * (z - 0.5 * _NORMAL)


@dataclass(frozen=True)
class HeldOutScore:
    """NLL per likelihood term, and the optimised dispersion: T of a classifier, or a Gaussian's variance factor."""

    nll: float
    dispersion: float
    link: Link
    cost: float = 0.0  # nats of the weak prior on the dispersion, for all terms together

    def total(self, n_terms: int) -> float:
        """NLL per term, including its share of the cost."""
        return self.nll + self.cost / n_terms


@singledispatch
def quick_scores(
    likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, freedom: Freedom
) -> list[HeldOutScore]:
    """One score per link that needs no draws; other likelihoods have nothing to optimise."""
    frame = Frame(targets.sites, torch.float64, DEFAULT, N_DRAWS, seeded(None))
    prediction = predictive.from_gaussian(likelihood, gaussian, frame)
    return [HeldOutScore(-float(prediction.log_prob(targets.y).mean()), 1.0, DEFAULT)]


@singledispatch
def final_scores(
    likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, coarse: HeldOutScore
) -> list[HeldOutScore]:
    """Scores of the default link, which is accurate but expensive, and of a quick one, near a temperature `coarse`."""
    return []


@singledispatch
def row_scores(
    likelihood: Likelihood, gaussian: SiteGaussian, targets: Targets, score: HeldOutScore
) -> Float[Tensor, " n"]:
    """Log probability of every likelihood term, at a score's dispersion and link."""
    frame = Frame(targets.sites, torch.float64, DEFAULT, N_DRAWS, seeded(None))
    return predictive.from_gaussian(likelihood, gaussian, frame).log_prob(targets.y).flatten()


_NORMAL = 3.0  # standard deviations within which the prior of the variance factor is normal
_MOST_LOG_FACTOR = 40.0  # bracket of the bisection, far beyond the bounds on the noise

# --- Gaussian ------------------------------------------------------------------------------------------------


@quick_scores.register
def _(likelihood: Gaussian, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[HeldOutScore]:
    """Noise D and covariance V, both multiplied by a:  NLL = ½ (log det 2πa(D + V) + rᵀ(D + V)⁻¹r / a).

    The best a under its prior, so that one outlier among few data does not inflate the noise.
    """
    r = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean) - gaussian.mean
    noise = torch.diag_embed(likelihood.resolved().detach().square().to(r).expand(r.shape))
    L, info = torch.linalg.cholesky_ex(noise + (gaussian.cov + gaussian.cov.mT) / 2)
    if bool(info.any()):  # the prior is so wide that the covariance is lost in rounding: not a candidate
        return [HeldOutScore(inf, 1.0, DEFAULT)]
    quadratics = (torch.linalg.solve_triangular(L, r[..., None], upper=False) ** 2).sum((-2, -1)).flatten()
    log_a = _cautious_log_factor(quadratics, r.shape[-1], freedom.noise) if freedom.noise else 0.0
    cost = freedom.cost_of_factor(log_a) if log_a else 0.0
    log_det = float(2 * L.diagonal(dim1=-2, dim2=-1).log().sum())
    scaled = r.numel() * (log(2 * pi) + log_a) + float(quadratics.sum()) * exp(-log_a)
    return [HeldOutScore(0.5 * (scaled + log_det) / len(quadratics), exp(log_a), DEFAULT, cost)]


def _cautious_log_factor(quadratics: Float[Tensor, " n"], n_outputs: int, std: float) -> float:
    """The best log a, or a quarter, half or three quarters of it: whichever has the largest gain minus its standard
    error.

    An outlier gains much from more noise, but its standard error is as large.
    """
    n, best = len(quadratics), _best_log_factor(float(quadratics.sum()), len(quadratics) * n_outputs, std)
    if n < 2:
        return 0.0
    log_a = best * torch.arange(5, dtype=torch.float64) / 4
    gains = -0.5 * (n_outputs * log_a[:, None] + torch.expm1(-log_a)[:, None] * quadratics)
    sure = gains.sum(1) - n**0.5 * gains.std(1)
    return float(log_a[int(sure.argmax())])


def _best_log_factor(quadratic: float, n: int, std: float) -> float:
    """argmin over ℓ of ½ (n ℓ + q e^{−ℓ}) plus its cost, a convex function, by bisection of the derivative."""
    low, high = -_MOST_LOG_FACTOR, _MOST_LOG_FACTOR
    for _ in range(60):
        log_a = 0.5 * (low + high)
        pull = max(-_NORMAL, min(_NORMAL, log_a / std)) / std
        rising = 0.5 * (n - quadratic * exp(-log_a)) + pull > 0
        low, high = (low, log_a) if rising else (log_a, high)
    return 0.5 * (low + high)


@row_scores.register
def _(likelihood: Gaussian, gaussian: SiteGaussian, targets: Targets, score: HeldOutScore) -> Float[Tensor, " n"]:
    r = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean) - gaussian.mean
    noise = torch.diag_embed(likelihood.resolved().detach().square().to(r).expand(r.shape))
    V = score.dispersion * (noise + (gaussian.cov + gaussian.cov.mT) / 2)
    joint = torch.distributions.MultivariateNormal(torch.zeros_like(r), V, validate_args=False)
    return joint.log_prob(r).flatten()


# --- classes ---------------------------------------------------------------------------------------------------

_LOG_T = torch.linspace(-1.8, 2.4, 8, dtype=torch.float64)  # 0.17 … 11, including T = 1
_NEAR = torch.tensor([-0.2, 0.0, 0.2], dtype=torch.float64)
_MOST_AT_ONCE = 1 << 22  # numbers in covariances for several temperatures

Nll = Callable[[Tensor], Tensor]  # temperatures (k,) → NLL per likelihood term (k,)


@dataclass(frozen=True, eq=False)
class Terms:
    """Log probabilities of all terms at temperatures (k,).

    Calling it gives the negative mean, in chunks of temperatures.
    """

    log_p: Callable[[Tensor], Tensor]  # (k,) → (k, terms)
    floats: int  # per temperature

    def __call__(self, T: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        at_once = max(1, _MOST_AT_ONCE // max(1, self.floats))
        return torch.cat([-self.log_p(part).mean(1) for part in T.split(at_once)])


@quick_scores.register
def _(likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[HeldOutScore]:
    labels = _Labels.of(likelihood, gaussian, targets)
    return [_best_on(_LOG_T, labels.by_formula(link), link, freedom, targets.n_terms) for link in (PAIRWISE, PROBIT)]


@final_scores.register
def _(
    likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, coarse: HeldOutScore
) -> list[HeldOutScore]:
    draws = links.gaussian_draws(gaussian.mean, gaussian.cov, N_DRAWS, generator=seeded(None))
    labels = _Labels.of(likelihood, gaussian, targets)
    return _near(coarse, labels.by_draws(draws), labels.by_formula(coarse.link), freedom, targets.n_terms)


@row_scores.register
def _(likelihood: Categorical, gaussian: SiteGaussian, targets: Targets, score: HeldOutScore) -> Float[Tensor, " n"]:
    labels, T = _Labels.of(likelihood, gaussian, targets), gaussian.mean.new_tensor([score.dispersion])
    if score.link != DEFAULT:
        return labels.by_formula(score.link).log_p(T)[0]
    draws = links.gaussian_draws(gaussian.mean, gaussian.cov, N_DRAWS, generator=seeded(None))
    return labels.by_draws(draws).log_p(T)[0]


@dataclass(frozen=True, eq=False)
class _Labels:
    """The labels, the Gaussian over some logits, and the means of the other logits.

    The other classes are modelled as f_j = m_j + common part + independent part. The common part is the mean deviation
    of the classes with covariance V; the variance v of the independent part is the mean difference between variances
    and covariances in V. For many such classes, log Σ_j exp(f_j / T) ≈ log Σ_j exp(m_j / T) + v / 2T² + common part /
    T.
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
        """A closed-form link; one additional class represents the rest; accurate enough to order candidates."""

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
        """The default link: log of the mean of softmax(f_s / T) at the label, over draws f_s."""
        at_label = draws.gather(-1, self.index.expand(len(draws), *self.index.shape))[..., 0]
        common = (draws - self.gaussian.mean).mean(-1)

        def log_p(T: Float[Tensor, " k"]) -> Float[Tensor, "k n t"]:
            beside = _as_axis(T, draws)
            total = torch.logsumexp(draws / beside[..., None], -1)  # (k, s, n, t)
            if self.rest.shape[-1]:
                total = torch.logaddexp(total, self._rest(T)[:, None] + common / beside)
            return torch.logsumexp(at_label / beside - total, 1) - log(len(draws))

        return self._mean_of(log_p, draws.numel())

    def _rest(self, T: Float[Tensor, " k"]) -> Float[Tensor, "k n t"]:
        """logsumexp of the other classes, without the common part."""
        beside, cov = _as_axis(T, self.rest), self.gaussian.cov
        c, variances = cov.shape[-1], cov.diagonal(dim1=-2, dim2=-1).sum(-1)
        own = (variances / c - (cov.sum((-2, -1)) - variances) / (c * (c - 1))).clamp(min=0)
        return torch.logsumexp(self.rest / beside, -1) + own / (2 * beside[..., 0] ** 2)

    def _expanded(self, T: Tensor) -> Int[Tensor, "k n t 1"]:
        return self.index.expand(len(T), *self.index.shape)

    def _mean_of(self, log_p: Callable[[Tensor], Tensor], floats: int) -> Terms:
        """Log probabilities of the labels; zero at ignored ones."""
        return Terms(lambda T: torch.where(self.counted, log_p(T), 0.0).flatten(1), floats)


@quick_scores.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, freedom: Freedom) -> list[HeldOutScore]:
    nll = _bernoulli_terms(likelihood, gaussian, targets, PROBIT)
    return [_best_on(_LOG_T, nll, PROBIT, freedom, targets.n_terms)]


@final_scores.register
def _(
    likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, freedom: Freedom, coarse: HeldOutScore
) -> list[HeldOutScore]:
    exact, quick = (_bernoulli_terms(likelihood, gaussian, targets, link) for link in (DEFAULT, coarse.link))
    return _near(coarse, exact, quick, freedom, targets.n_terms)


def _bernoulli_terms(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, link: Link) -> Terms:
    """Σ_c log p(y_c) of every term, with p from the link at f / T."""
    y = likelihood.encode(targets.y, targets.sites, len(gaussian.mean)).to(gaussian.mean)

    def log_p(T: Float[Tensor, " k"]) -> Float[Tensor, "k n"]:
        m, cov = _tempered(gaussian, T)
        var = cov.diagonal(dim1=-2, dim2=-1).clamp(min=0)
        one, zero = link.binary(m, var, n_draws=N_DRAWS, generator=seeded(None))
        return (y * one + (1 - y) * zero).sum(-1).flatten(1)

    return Terms(log_p, gaussian.cov.numel() * (_NODES if link == DEFAULT else 1))


@row_scores.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, targets: Targets, score: HeldOutScore) -> Float[Tensor, " n"]:
    T = gaussian.mean.new_tensor([score.dispersion])
    return _bernoulli_terms(likelihood, gaussian, targets, score.link).log_p(T)[0]


_NODES = 200  # approximate number of quadrature nodes for one logit, for memory


def _as_axis(T: Float[Tensor, " k"], mean: Tensor) -> Float[Tensor, "k 1 1 1"]:
    """Temperatures (k, 1, 1, 1), to broadcast over the data."""
    return T.to(mean)[:, None, None, None]


def _tempered(
    gaussian: SiteGaussian, T: Float[Tensor, " k"]
) -> tuple[Float[Tensor, "k n t c"], Float[Tensor, "k n t c c"]]:
    """Mean and covariance of f / T at every temperature."""
    beside = _as_axis(T, gaussian.mean)
    return gaussian.mean / beside, gaussian.cov / beside[..., None] ** 2


def _best_on(log_T: Float[Tensor, " k"], nll: Nll, link: Link, freedom: Freedom, n_terms: int) -> HeldOutScore:
    """The best of equidistant log temperatures, refined by the vertex of the parabola through it and its neighbours."""
    tried = _scored(nll, log_T, link, freedom)
    i = min(range(len(tried)), key=lambda k: tried[k].total(n_terms))
    middle = min(max(i, 1), len(tried) - 2)
    around = [tried[k].total(n_terms) for k in (middle - 1, middle, middle + 1)]
    at = log_T[middle - 1 : middle + 2].tolist()
    vertex = min(max(_vertex(at, around), at[0]), at[2])
    return min([tried[i], *_scored(nll, log_T.new_tensor([vertex]), link, freedom)], key=lambda s: s.total(n_terms))


def _near(coarse: HeldOutScore, exact: Nll, quick: Nll, freedom: Freedom, n_terms: int) -> list[HeldOutScore]:
    """The accurate and the quick link, at temperatures around the best of a coarse grid."""
    log_T = log(coarse.dispersion) + _NEAR
    return [_best_on(log_T, nll, link, freedom, n_terms) for nll, link in ((exact, DEFAULT), (quick, coarse.link))]


def _scored(nll: Nll, log_T: Float[Tensor, " k"], link: Link, freedom: Freedom) -> list[HeldOutScore]:
    T = log_T.double().exp()
    return [HeldOutScore(value, t, link, freedom.cost(t)) for value, t in zip(nll(T).tolist(), T.tolist(), strict=True)]


def _vertex(at: list[float], values: list[float]) -> float:
    """The minimum of the parabola through three equidistant points; the middle point if it opens downwards."""
    curvature = values[0] - 2 * values[1] + values[2]
    return at[1] if not 0 < curvature < inf else at[1] + 0.5 * (at[1] - at[0]) * (values[0] - values[2]) / curvature
