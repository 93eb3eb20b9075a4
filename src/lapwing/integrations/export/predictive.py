"""What the exported program answers: moments of targets, or probabilities and doubt."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lapwing.errors import StructureError
from lapwing.integrations.export.network import OutputGaussian
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.posterior import Posterior
from lapwing.predictive.links import sobol_normal
from lapwing.runtime.arguments import seeded

_DRAWS = 1_000
_MOST_CLASSES = 32  # whose Cholesky factor is written out


class Moments(nn.Module):
    """(mean, variance) of targets, noise included."""

    names = ("mean", "variance")
    noise: Tensor

    def __init__(self, gaussian: OutputGaussian, posterior: Posterior, dtype: torch.dtype) -> None:
        super().__init__()
        self.gaussian = gaussian
        likelihood = posterior.observed_likelihood
        assert isinstance(likelihood, Gaussian)
        by_site = likelihood.resolved().detach().square().expand(posterior.sites.t, posterior.sites.c)
        self.register_buffer("noise", posterior.sites.join(by_site[None]).flatten().to(dtype))
        self.shape = posterior.linearised.datum_shape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, cov = self.gaussian(x)
        variance = torch.diagonal(cov, dim1=-2, dim2=-1) + self.noise
        return mean.reshape(-1, *self.shape), variance.reshape(-1, *self.shape)


class Classes(nn.Module):
    """(probabilities, epistemic): averages over the quasi-random draws that `predict` takes."""

    names = ("probs", "epistemic")
    eps: Tensor

    def __init__(self, gaussian: OutputGaussian, posterior: Posterior, dtype: torch.dtype) -> None:
        super().__init__()
        self.gaussian, self.temperature = gaussian, float(posterior.temperature)
        self.binary = isinstance(posterior.likelihood, Bernoulli)
        if posterior.sites.t > 1 or (self.binary and posterior.linearised.k > 1):
            raise StructureError(
                f"export: one label per input is exported; these outputs are {posterior.linearised.datum_shape} each."
            )
        if posterior.linearised.k > _MOST_CLASSES:
            raise StructureError(
                f"export: probabilities of up to {_MOST_CLASSES} classes are written out; this model has "
                f"{posterior.linearised.k}."
            )
        self.register_buffer("eps", sobol_normal(_DRAWS, posterior.linearised.k, generator=seeded(None)).to(dtype))
        self.shape = posterior.linearised.datum_shape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, cov = self.gaussian(x)
        f = (mean[:, None] + self.eps @ _cholesky(cov).mT) / self.temperature  # (B, S, K)
        if self.binary:
            f = torch.cat([torch.zeros_like(f), f], -1)
        log_p = torch.log_softmax(f, -1)
        p = log_p.exp()
        probs = p.mean(1)
        entropy = -(probs * (probs + 1e-30).log()).sum(-1)
        epistemic = (entropy + (p * log_p).sum(-1).mean(1)).clamp(min=0)
        if self.binary:
            return probs[:, 1:].reshape(-1, *self.shape), epistemic.reshape(-1, *self.shape)
        return probs, epistemic


def predictive(gaussian: OutputGaussian, posterior: Posterior, dtype: torch.dtype) -> Moments | Classes:
    if isinstance(posterior.likelihood, Gaussian):
        return Moments(gaussian, posterior, dtype)
    if isinstance(posterior.likelihood, Categorical | Bernoulli):
        return Classes(gaussian, posterior, dtype)
    raise StructureError(
        f"export: Gaussian, categorical and binary likelihoods are known, not {type(posterior.likelihood).__name__}."
    )


def _cholesky(cov: Tensor) -> Tensor:
    """L with L Lᵀ = cov, entry by entry: ONNX has no such operation. Directions without variance stay zero."""
    k = cov.shape[-1]
    columns: list[Tensor] = []
    for j in range(k):
        left = cov[:, j:, j]
        for column in columns:
            left = left - column[:, j:] * column[:, j : j + 1]
        pivot = left[:, :1].clamp(min=0)
        # What is left of a variance below rounding is zero.
        least = 1e-6 * cov[:, j : j + 1, j] if cov.dtype == torch.float32 else 1e-14 * cov[:, j : j + 1, j]
        scale = torch.where(pivot > least, torch.where(pivot > least, pivot, 1.0).rsqrt(), torch.zeros_like(pivot))
        columns.append(torch.cat([torch.zeros_like(cov[:, :j, 0]), left * scale], -1))
    return torch.stack(columns, -1)
