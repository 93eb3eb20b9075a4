"""The posterior of an image: around the network's reconstruction, as wide as the data and the prior leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, pi, sqrt
from types import MappingProxyType
from typing import Any

import torch

from lapwing._types import Float, Scalar, Tensor
from lapwing.errors import InputError, ShapeError
from lapwing.imaging.evidence import Found
from lapwing.imaging.operator import Operator, as_tensor
from lapwing.imaging.patches import Patches, gaussian_log_prob
from lapwing.imaging.prior import ImagePrior
from lapwing.imaging.ways import Way
from lapwing.linalg import leading_eigenpairs
from lapwing.posterior.diagnosis import Diagnosis, Finding
from lapwing.runtime.arguments import counted, seeded

_DEAD = 1e-10  # of the largest variance: such a pixel has none
_DIRECTIONS = 100  # leading singular directions of A that the image-noise correction inverts


@dataclass(frozen=True, eq=False)
class Inserted:
    """What the evidence is evaluated with: the weights' quadratic form and the residual, or the linear model's target.

    `target` is y_o = y − A (x̂ − J θ̂); `residual` and `scatters` are None at the linear model's own mode.
    """

    target: Float[Tensor, " m"]
    residual: Float[Tensor, " m"] | None = None
    scatters: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ImagingPosterior:
    """x ~ N(mean, covariance), given the data: a frozen value. All is of the image without observation noise."""

    operator: Operator
    mean: Float[Tensor, "h w"]
    prior: ImagePrior
    eta: Float[Tensor, " q"]  # logarithms of the hyperparameters
    noise_std: float
    way: Way
    mode: str
    inserted: Inserted
    found: Found | None = None  # None where the hyperparameters were given
    image_noise_var: float = 0.0
    input: Tensor | None = None
    network: Any = None

    def __repr__(self) -> str:
        named = ", ".join(f"{name} {value:.3g}" for name, value in list(self.hyperparameters.items())[:4])
        more = ", …" if len(self.hyperparameters) > 4 else ""
        return f"ImagingPosterior({self.operator!r}, noise_std {self.noise_std:.3g}, {named}{more}; {self.way.name})"

    @property
    def hyperparameters(self) -> Mapping[str, float]:
        """Variances and length scales by name: "variance", or "<block>.variance" and "<block>.length_scale"."""
        return MappingProxyType(self.prior.described(self.eta))

    @property
    def std(self) -> Float[Tensor, "h w"]:
        """The standard deviation of every pixel."""
        return (self.way.variance() + self.image_noise_var).sqrt().reshape(self.mean.shape)

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "h w"], Float[Tensor, "h w"]]:
        """The central interval of every pixel."""
        if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
            raise InputError(f"interval: the level must lie between 0 and 1, got {level!r}.")
        half = float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64))) * self.std
        return self.mean - half, self.mean + half

    def covariance(self) -> Float[Tensor, "d d"]:
        """Of all pixels, in the order of mean.flatten()."""
        cov = self.way.covariance()
        cov.diagonal().add_(self.image_noise_var)
        return cov

    def sample(self, n: int = 1, *, generator: torch.Generator | None = None) -> Float[Tensor, "n h w"]:
        """Images from the posterior, by Matheron's rule; the same for the same generator state."""
        random = seeded(generator)
        draws = self.way.sample(counted("n", n), random)
        if self.image_noise_var:
            draws = draws + sqrt(self.image_noise_var) * torch.randn(draws.shape, dtype=draws.dtype, generator=random)
        return self.mean + draws.reshape(-1, *self.mean.shape)

    def log_prob(self, image: Any, *, patch: int | None = None, halved: bool = False) -> Scalar:
        """log N(image; mean, covariance) in nats; divide by the pixels for the usual score.

        `patch`: the sum over patches of so many pixels a side, as if they were independent; 1 takes variances only.
        `halved`: covariances within a patch count half, for those that are estimated from few samples.
        """
        x = as_tensor(image, "image").double()
        if tuple(x.shape) != tuple(self.mean.shape):
            raise ShapeError(f"log_prob: expected an image of {tuple(self.mean.shape)}, got {tuple(x.shape)}.")
        if not bool(torch.isfinite(x).all()):
            raise InputError("log_prob: the image holds NaN or infinite values.")
        deviation = (x - self.mean).reshape(-1)
        if patch is None:
            cov = self.covariance()
            return gaussian_log_prob(deviation[None], cov[None]) - 0.5 * len(deviation) * log(2 * pi)
        return Patches.of(tuple(self.mean.shape), patch).log_prob(deviation, self._of_pixels, halved=halved)

    def _of_pixels(self, pixels: Tensor) -> Float[Tensor, "b k k"]:
        cov = self.way.covariances(pixels).clone()
        cov.diagonal(dim1=1, dim2=2).add_(self.image_noise_var)
        return cov

    def log_evidence(self) -> Scalar:
        """log p(y) of the linear model, at its own mode or with the weights that were inserted."""
        log_det, quad = self.way.log_det_and_quad(self.inserted.target)
        if self.inserted.residual is not None and self.inserted.scatters is not None:
            fit = self.inserted.residual.square().sum() / self.noise_std**2
            quad = fit + self.prior.quadratic(self.eta, self.inserted.scatters)
        return -0.5 * log_det - 0.5 * quad - 0.5 * len(self.inserted.target) * log(2 * pi)

    @cached_property
    def correction(self) -> float:
        """c = σ² · mean diag pinv(AᵀA) over its 100 leading directions: noise of the data as noise of the image."""
        return self.noise_std**2 * pseudo_inverse_diagonal(self.operator, _DIRECTIONS)

    def corrected(self) -> ImagingPosterior:
        """The same with c I added to the covariance, in everything: the image-noise correction."""
        return replace(self, image_noise_var=self.correction)

    def diagnose(self) -> Diagnosis:
        """How it was computed, and what may be wrong with it."""
        return Diagnosis(tuple(_findings(self)))


def pseudo_inverse_diagonal(A: Operator, rank: int) -> float:
    """mean diag of the pseudo-inverse of AᵀA, of its leading eigenpairs only: Σ 1/λ_i over the number of pixels."""
    m, d = A.linear.m, A.linear.d
    rank = min(rank, m, d)
    start = torch.randn(min(rank + 20, d), d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = leading_eigenpairs(lambda x: A.linear.transposed(A.linear(x)), start, rank, rtol=1e-8)
    return float((1 / pairs.values).sum()) / d


def _findings(post: ImagingPosterior) -> list[Finding]:
    found = post.found
    items = [
        Finding("way", f"{post.way.name}: {post.way.accuracy()}", False, ""),
        Finding("evidence", f"evaluated at {_MODES[post.mode]}", False, ""),
        Finding("noise", f"standard deviation {post.noise_std:.3g}", False, ""),
    ]
    dead = int((post.way.variance() <= _DEAD * post.way.variance().max()).sum())
    if dead:
        advice = "The network is saturated there, so the error bars are too small: posterior.corrected() adds a floor."
        items.append(
            Finding("pixels without variance", f"{dead} of {post.mean.numel()}", not post.image_noise_var, advice)
        )
    if found is None:
        items.append(Finding("hyperparameters", "given, not chosen", False, ""))
        return items
    value = f"{len(found.history)} evaluations, objective {found.loss:.6g}"
    items.append(Finding("hyperparameters", value, False, ""))
    if found.at_bound:
        advice = "The data switch such a block off, or do not determine it."
        items.append(Finding("hyperparameters at a bound", ", ".join(found.at_bound), True, advice))
    if found.not_monotone:
        advice = "The change of variables of TV-PredCP does not hold there: compare with tv_prior=False."
        items.append(Finding("expected total variation not monotone in ℓ", ", ".join(found.not_monotone), True, advice))
    return items


_MODES = {
    "conjugate": "the linear model's own mode",
    "network": "the network's weights",
    "refit_tv": "weights of the linear model, fitted with total variation",
}
