"""From outputs to a Prediction, with one rule per likelihood.

`from_gaussian` integrates the likelihood over a Gaussian on the outputs (the linearised, or GLM, predictive).
`from_draws` averages it over draws of the outputs (sampled networks or functions). Both give a mixture of the
likelihood's own family, or a closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from math import log
from typing import Any

import torch
from torch import distributions as td

from lapwing._types import Float, Tensor
from lapwing.errors import StructureError
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    CustomLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Sites,
)
from lapwing.linalg import safe_sqrt
from lapwing.predictive import links
from lapwing.predictive.counts import log_mean_poisson
from lapwing.predictive.link_rules import Link, log_mean, log_mean_sigmoid
from lapwing.predictive.mixtures import mixture_quantile, poisson_mixture_quantile
from lapwing.predictive.prediction import (
    ClassPrediction,
    DensityPrediction,
    Prediction,
    RegressionPrediction,
)
from lapwing.predictive.pushforward import SiteGaussian


@dataclass(frozen=True, eq=False)
class Frame:
    """The format of results: output shapes of the model, dtype; and the link and number of draws of averages."""

    sites: Sites
    dtype: torch.dtype
    link: Link
    n_samples: int
    generator: torch.Generator

    def outputs(self, v: Tensor) -> Tensor:
        """(n, T, C) → the model's output shape."""
        return self.sites.join(v).to(self.dtype)

    def labels(self, v: Tensor) -> Tensor:
        """(n, T) → one value per likelihood term."""
        return v.reshape(v.shape[0], *self.sites.site_shape).to(self.dtype)


@singledispatch
def from_gaussian(likelihood: Likelihood, gaussian: SiteGaussian, frame: Frame) -> Prediction:
    """Any likelihood without a rule of its own: average over draws of the outputs."""
    draws = links.gaussian_draws(gaussian.mean, gaussian.cov, frame.n_samples, generator=frame.generator)
    return from_draws(likelihood, draws, frame)


@singledispatch
def from_draws(likelihood: Likelihood, f: Float[Tensor, "s n t c"], frame: Frame) -> Prediction:
    """Average the likelihood over draws f of the outputs."""

    raise StructureError(f"No predictive is known for {type(likelihood).__name__}.")


# --- Gaussian --------------------------------------------------------------------------------------


@from_gaussian.register
def _(likelihood: Gaussian, gaussian: SiteGaussian, frame: Frame) -> Prediction:
    """N(m, V + σ²I), exact."""
    noise_var = likelihood.resolved().square().to(gaussian.mean).expand_as(gaussian.mean)
    epistemic = gaussian.cov.diagonal(dim1=-2, dim2=-1)
    # The noise enters after the root: cov may be singular, or far larger than the noise.
    total_std = (epistemic + noise_var).sqrt()
    root = links.noisy_root(gaussian.cov, noise_var)
    # No validation: the factor is triangular with a positive diagonal by construction.
    joint = td.MultivariateNormal(gaussian.mean, scale_tril=root, validate_args=False)

    def log_density(y: Any) -> Tensor:
        encoded = likelihood.encode(y, frame.sites, len(gaussian.mean))
        return frame.labels(joint.log_prob(encoded.to(gaussian.mean)))

    def quantile(level: float) -> Tensor:
        z = torch.special.ndtri(torch.tensor(level, dtype=torch.float64))
        return frame.outputs(gaussian.mean + z * total_std)

    distribution: td.Distribution
    if frame.sites.c == 1:
        distribution = td.Normal(frame.outputs(gaussian.mean), frame.outputs(total_std), validate_args=False)
    else:
        shape = (len(gaussian.mean), *frame.sites.site_shape, frame.sites.c)
        distribution = td.MultivariateNormal(
            gaussian.mean.reshape(shape).to(frame.dtype),
            scale_tril=root.reshape(*shape, frame.sites.c).to(frame.dtype),
            validate_args=False,
        )
    return RegressionPrediction(
        frame.outputs(gaussian.mean),
        frame.outputs(epistemic),
        frame.outputs(noise_var),
        distribution,
        quantile,
        log_density,
    )


@from_draws.register
def _(likelihood: Gaussian, f: Tensor, frame: Frame) -> Prediction:
    """A mixture of N(f_s, σ²) with equal weights."""
    noise_std = likelihood.resolved().to(f).expand_as(f)
    return _normal_mixture(likelihood, f, noise_std, frame, frame.outputs)


@from_draws.register
def _(likelihood: HeteroscedasticGaussian, f: Tensor, frame: Frame) -> Prediction:
    mean, variance = likelihood.natural_to_moments(f)
    return _normal_mixture(
        likelihood, mean[..., None], variance.sqrt()[..., None], frame, lambda v: frame.labels(v[..., 0])
    )


def _normal_mixture(
    likelihood: Likelihood, means: Tensor, stds: Tensor, frame: Frame, shaped: Callable[[Tensor], Tensor]
) -> Prediction:
    """1/S Σ_s N(m_s, σ_s²): epistemic = Var m_s, aleatoric = mean of σ_s²."""

    def log_density(y: Any) -> Tensor:
        encoded = likelihood.encode(y, frame.sites, means.shape[1]).to(means).reshape(means.shape[1:])
        each = td.Normal(means, stds, validate_args=False).log_prob(encoded).sum(-1)
        return frame.labels(torch.logsumexp(each, 0) - log(len(means)))

    return RegressionPrediction(
        shaped(means.mean(0)),
        shaped(means.var(0, correction=0)),  # correction=0: epistemic + aleatoric is the mixture's variance exactly
        shaped((stds**2).mean(0)),
        _normal_components(means, stds, frame, shaped),
        lambda level: shaped(mixture_quantile(means, stds, level)),
        log_density,
    )


# --- counts ----------------------------------------------------------------------------------------


@from_gaussian.register
def _(likelihood: Poisson, gaussian: SiteGaussian, frame: Frame) -> Prediction:
    """E[y] = e^{m + v/2}, Var[y] = E[y] + (e^v − 1) e^{2m + v}; Gauss–Hermite over the log rate for the mixture."""
    # Enough for a mixture object; log densities are integrated on panels, also at large variances.
    nodes, weights = links.gauss_hermite(32)
    std = safe_sqrt(gaussian.cov.diagonal(dim1=-2, dim2=-1))
    f = gaussian.mean + std * nodes.to(std).reshape(-1, 1, 1, 1)
    mean = (gaussian.mean + std**2 / 2).exp() * likelihood.exposure

    def log_density(y: Any) -> Tensor:
        encoded = likelihood.encode(y, frame.sites, len(std)).to(f)
        # Several counts of a term are scored by their marginals, one by one.
        return frame.labels(log_mean_poisson(encoded[..., 0], gaussian.mean + encoded[..., 1], std**2).sum(-1))

    epistemic = torch.expm1(std**2) * mean**2
    return _poisson_mixture(likelihood, f, weights.to(std), frame, mean, epistemic, log_density)


@from_draws.register
def _(likelihood: Poisson, f: Tensor, frame: Frame) -> Prediction:
    rates = f.exp() * likelihood.exposure
    weights = f.new_full((len(f),), 1 / len(f))

    def log_density(y: Any) -> Tensor:
        encoded = likelihood.encode(y, frame.sites, f.shape[1]).to(f)
        counts, g = encoded[..., 0], f + encoded[..., 1]
        each = counts * g - g.exp() - torch.lgamma(counts + 1)
        return frame.labels((torch.logsumexp(each, 0) - log(len(f))).sum(-1))

    return _poisson_mixture(likelihood, f, weights, frame, rates.mean(0), rates.var(0, correction=0), log_density)


def _poisson_mixture(
    likelihood: Poisson,
    f: Tensor,
    weights: Tensor,
    frame: Frame,
    mean: Tensor,
    epistemic: Tensor,
    log_density: Callable[[Any], Tensor],
) -> Prediction:
    """Σ_s w_s Poisson(e^{f_s}); the aleatoric variance of a count equals its mean."""
    rates = f.exp() * likelihood.exposure
    components = td.Poisson(_components(frame.outputs, rates), validate_args=False)
    mixing = td.Categorical(probs=weights.to(frame.dtype).expand(components.batch_shape), validate_args=False)
    return RegressionPrediction(
        frame.outputs(mean),
        frame.outputs(epistemic),
        frame.outputs(mean),
        td.MixtureSameFamily(mixing, components, validate_args=False),
        lambda level: frame.outputs(poisson_mixture_quantile(rates, weights, level)),
        log_density,
    )


# --- classes ---------------------------------------------------------------------------------------


@from_gaussian.register
def _(likelihood: Categorical, gaussian: SiteGaussian, frame: Frame) -> Prediction:
    draws = links.gaussian_draws(gaussian.mean, gaussian.cov, frame.n_samples, generator=frame.generator)
    log_p = torch.log_softmax(draws, -1)
    return _categorical(likelihood, log_p, frame.link.categorical(gaussian.mean, gaussian.cov, log_p), frame)


@from_draws.register
def _(likelihood: Categorical, f: Tensor, frame: Frame) -> Prediction:
    log_p = torch.log_softmax(f, -1)
    return _categorical(likelihood, log_p, log_mean(log_p), frame)


def _categorical(likelihood: Categorical, log_p: Tensor, log_probs: Tensor, frame: Frame) -> Prediction:
    """`log_p` (s, n, t, c) are those of every draw, `log_probs` (n, t, c) their average according to the link."""

    def log_density(y: Any) -> Tensor:
        labels = likelihood.encode(y, frame.sites, log_probs.shape[0])
        counted = labels != likelihood.ignore_index
        picked = log_probs.gather(-1, torch.where(counted, labels, 0).to(log_probs.device)[..., None])[..., 0]
        return frame.labels(torch.where(counted.to(picked.device), picked, 0.0))

    p = log_p.exp()
    shape = (log_probs.shape[0], *frame.sites.site_shape, frame.sites.c)
    return ClassPrediction(
        log_probs.reshape(shape).to(frame.dtype),
        frame.labels(-(p * log_p).sum(-1).mean(0)),
        (p - p.square()).mean(0).reshape(shape).to(frame.dtype),
        lambda v: frame.outputs(v.reshape(len(v), *log_probs.shape[1:])),
        log_density,
        binary=False,
        ignore_index=likelihood.ignore_index,
    )


@from_gaussian.register
def _(likelihood: Bernoulli, gaussian: SiteGaussian, frame: Frame) -> Prediction:
    """Each logit separately: one-dimensional integrals, by quadrature."""
    m, v = gaussian.mean, gaussian.cov.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    log_p1, log_p0 = frame.link.binary(m, v, n_draws=frame.n_samples, generator=frame.generator)
    return _bernoulli(likelihood, log_p1, log_p0, lambda function: links.expect_logistic(function, m, v), frame)


@from_draws.register
def _(likelihood: Bernoulli, f: Tensor, frame: Frame) -> Prediction:
    return _bernoulli(
        likelihood, log_mean_sigmoid(f), log_mean_sigmoid(-f), lambda function: function(f).mean(0), frame
    )


def _bernoulli(
    likelihood: Bernoulli,
    log_p1: Tensor,
    log_p0: Tensor,
    expect: Callable[[Callable[[Tensor], Tensor]], Tensor],
    frame: Frame,
) -> Prediction:
    """Predictions from log p(1), log p(0) and expectations of functions of the logit."""

    def log_density(y: Any) -> Tensor:
        encoded = likelihood.encode(y, frame.sites, len(log_p1)).to(log_p1)
        return frame.labels((encoded * log_p1 + (1 - encoded) * log_p0).sum(-1))

    noise = frame.outputs(expect(lambda f: torch.sigmoid(f) * torch.sigmoid(-f)))
    return ClassPrediction(
        torch.stack([frame.outputs(log_p0), frame.outputs(log_p1)], -1),
        frame.outputs(expect(_bernoulli_entropy)),
        torch.stack([noise, noise], -1),
        lambda v: v[..., 1],
        log_density,
        binary=True,
    )


def _bernoulli_entropy(f: Tensor) -> Tensor:
    """Entropy of a Bernoulli, H = p softplus(−f) + (1 − p) softplus(f), without cancellation for large |f|."""
    logsigmoid = torch.nn.functional.logsigmoid
    return -torch.sigmoid(f) * logsigmoid(f) - torch.sigmoid(-f) * logsigmoid(-f)


# --- anything else ---------------------------------------------------------------------------------


@from_draws.register
def _(likelihood: CustomLikelihood, f: Tensor, frame: Frame) -> Prediction:
    def log_density(y: Any) -> Tensor:
        encoded = likelihood.encode(y, frame.sites, f.shape[1])
        each = torch.stack([likelihood.log_prob(draw, encoded) for draw in f])
        return frame.labels(torch.logsumexp(each, 0) - log(len(f)))

    mean = None if likelihood.mean_function is None else likelihood.mean_function(f).mean(0)
    return DensityPrediction(mean, log_density)


def _components(shaped: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """(S, n, T, C) → (…, S): mixtures have their components on the last axis."""
    return torch.stack([shaped(each) for each in v], dim=-1)


def _normal_components(
    means: Tensor, stds: Tensor, frame: Frame, shaped: Callable[[Tensor], Tensor]
) -> td.Distribution:
    """The mixture as a distribution. The outputs of a term share a draw, so they form one multivariate event."""
    if means.shape[-1] == 1:
        each: td.Distribution = td.Normal(_components(shaped, means), _components(shaped, stds), validate_args=False)
    else:
        shape = (*means.shape[:2], *frame.sites.site_shape, frame.sites.c)
        loc, scale = (v.reshape(shape).movedim(0, -2).to(frame.dtype) for v in (means, stds))
        each = td.Independent(td.Normal(loc, scale, validate_args=False), 1, validate_args=False)
    equal = torch.zeros(each.batch_shape, dtype=frame.dtype, device=means.device)
    return td.MixtureSameFamily(td.Categorical(logits=equal, validate_args=False), each, validate_args=False)
