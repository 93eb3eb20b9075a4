"""Every way of giving a reconstruction error bars that the CT study compares, and their scores."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import log, pi
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import InputError
from lapwing_studies.reproduce.study import Record

DROPOUT = 0.05
BANDWIDTH = 0.05  # of the kernel density estimate over whole images
_AT_ONCE = 64  # passes with dropout


@dataclass(frozen=True)
class Scored:
    """A Gaussian over images by its mean and standard deviation, and its log densities."""

    mean: Tensor
    std: Tensor
    full: float
    pixels: float
    patches: float
    noise_std: float | None = None

    def row(self, method: str, truth: Tensor) -> Record:
        d, error = truth.numel(), (truth - self.mean).abs()
        inside = error <= 1.959963984540054 * self.std
        varies = bool(self.std.std() > 1e-12)
        both = torch.stack([self.std.flatten(), error.flatten()])
        return Record(
            method=method,
            full=self.full / d,
            pixels=self.pixels / d,
            patches=self.patches / d,
            psnr=float(lw.imaging.psnr(self.mean, truth)),
            ssim=ssim(self.mean, truth),
            coverage=float(inside.double().mean()),
            correlation=float(torch.corrcoef(both)[0, 1]) if varies else None,
            std=float(self.std.mean()),
            noise_std=self.noise_std,
        )


def linearised(post: lw.imaging.ImagingPosterior, truth: Tensor) -> Scored:
    """A posterior with its image-noise correction."""
    q = post.corrected()
    full, pixels, patches = (float(q.log_prob(truth, patch=side)) for side in (None, 1, 4))
    return Scored(q.mean, q.std, full, pixels, patches, q.noise_std)


def deterministic(mean: Tensor, variance: float, truth: Tensor, noise_std: float) -> Scored:
    """N(x̂, c I): the reconstruction with the image-noise variance alone."""
    d = truth.numel()
    score = -0.5 * float((truth - mean).square().sum()) / variance - 0.5 * d * log(2 * pi * variance)
    return Scored(mean, torch.full_like(mean, variance**0.5), score, score, score, noise_std)


def with_dropout(network: lw.imaging.UNet) -> lw.imaging.UNet:
    """A copy that drops channels behind every 3 × 3 convolution."""
    copied = deepcopy(network)
    for module in list(copied.modules()):
        if isinstance(module, nn.Sequential) and isinstance(module[0], nn.Conv2d) and module[0].kernel_size == (3, 3):
            module.insert(1, nn.Dropout2d(DROPOUT))
    return copied


def dropout_draws(r: lw.imaging.Reconstruction, n: int, *, seed: int) -> Tensor:
    """Images of n passes with dropout on."""
    network = deepcopy(r.network).train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        sizes = [min(_AT_ONCE, n - start) for start in range(0, n, _AT_ONCE)]
        return torch.cat([network(r.input.expand(size, -1, -1, -1))[:, 0].double() for size in sizes])


def dropout(draws: Tensor, variance: float, truth: Tensor, *, seed: int) -> Scored:
    """Mean and variance over the passes, and c; whole images by a kernel density estimate, as in the paper's code."""
    mean, d = draws.mean(0), truth.numel()
    deviations = (draws - mean).flatten(1)
    std = (deviations.square().mean(0) + variance).sqrt().reshape(mean.shape)
    noise = torch.randn(draws.shape, dtype=draws.dtype, generator=torch.Generator().manual_seed(seed))
    jittered = draws + variance**0.5 * noise
    squared = ((jittered - truth) / BANDWIDTH).square().flatten(1).sum(1)
    density = torch.logsumexp(-0.5 * squared, 0) - log(len(draws)) - 0.5 * d * log(2 * pi * BANDWIDTH**2)
    scores = [_patched(deviations, (truth - mean).flatten(), variance, tuple(truth.shape), side) for side in (1, 4)]
    return Scored(mean, std, float(density), *scores)


def _patched(x: Tensor, deviation: Tensor, variance: float, shape: tuple[int, ...], side: int) -> float:
    """Σ log N over patches that tile the image, covariances by the passes and c."""
    if shape[0] % side or shape[1] % side:
        raise InputError(f"patches of {side} pixels do not tile images of {shape}.")
    at = torch.arange(shape[0] * shape[1]).reshape(shape).unfold(0, side, side).unfold(1, side, side)
    pixels = at.reshape(-1, side * side)
    some = x[:, pixels]
    cov = torch.einsum("nbi,nbj->bij", some, some) / len(x) + variance * torch.eye(side * side, dtype=x.dtype)
    zero = torch.zeros(side * side, dtype=x.dtype)
    return float(torch.distributions.MultivariateNormal(zero, cov).log_prob(deviation[pixels]).sum())


def ssim(image: Tensor, truth: Tensor, *, window: int = 7) -> float:
    """Structural similarity (Wang et al., 2004) with a uniform window and unbiased variances, as in scikit-image."""
    x, y = (v.double()[None, None] for v in (image, truth))
    spread = float(truth.max() - truth.min())
    one, two = (0.01 * spread) ** 2, (0.03 * spread) ** 2
    unbiased = window**2 / (window**2 - 1)

    def local(v: Tensor) -> Any:
        return F.avg_pool2d(v, window, 1)

    mx, my = local(x), local(y)
    vx, vy = unbiased * (local(x * x) - mx * mx), unbiased * (local(y * y) - my * my)
    cov = unbiased * (local(x * y) - mx * my)
    quotient = (2 * mx * my + one) * (2 * cov + two) / ((mx**2 + my**2 + one) * (vx + vy + two))
    return float(quotient.mean())
