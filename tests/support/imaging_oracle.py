"""The linearised deep image prior by brute force: every matrix written out in float64. Imports torch only."""

from __future__ import annotations

from math import exp, log, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn


def weights(network: nn.Module) -> dict[str, Tensor]:
    """Convolution and matrix weights, in the order of named_parameters."""
    return {name: p for name, p in network.named_parameters() if p.ndim > 1 and p.requires_grad}


def jacobian(network: nn.Module, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x̂, J and θ̂: one backward pass for each pixel."""
    inferred = weights(network)
    image = network(z).reshape(-1)
    rows = []
    for pixel in image:
        g = torch.autograd.grad(pixel, list(inferred.values()), retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if v is None else v for v, p in zip(g, inferred.values(), strict=True)]
        rows.append(torch.cat([v.reshape(-1) for v in filled]))
    theta = torch.cat([p.detach().reshape(-1) for p in inferred.values()])
    return image.detach(), torch.stack(rows), theta


def filter_covariance(kernel: tuple[int, int], length: float) -> Tensor:
    """exp(−distance/ℓ) between the taps, plus 1e-6 on the diagonal: two loops."""
    grid = [(i, j) for i in range(kernel[0]) for j in range(kernel[1])]
    C = torch.zeros(len(grid), len(grid), dtype=torch.float64)
    for a, (i, j) in enumerate(grid):
        for b, (k, m) in enumerate(grid):
            C[a, b] = exp(-sqrt((i - k) ** 2 + (j - m) ** 2) / length) + (1e-6 if a == b else 0.0)
    return C


def prior_covariance(network: nn.Module, block_of: dict[str, str], values: dict[str, float]) -> Tensor:
    """S_θ (P, P), block-diagonal over filters."""
    pieces = []
    for name, p in weights(network).items():
        v = values[f"{block_of[name]}.variance"]
        if p.ndim == 4 and p.shape[2] * p.shape[3] > 1:
            C = filter_covariance(tuple(p.shape[2:]), values[f"{block_of[name]}.length_scale"])
            pieces += [v * C] * (p.shape[0] * p.shape[1])
        else:
            pieces += [torch.full((1, 1), v, dtype=torch.float64)] * p.numel()
    return torch.block_diag(*pieces)


def posterior(A: Tensor, J: Tensor, S: Tensor, noise_var: float) -> Tensor:
    """The covariance of the image, in weight space: J (S⁻¹ + JᵀAᵀA J/σ²)⁻¹ Jᵀ."""
    H = (A @ J).T @ (A @ J) / noise_var
    return J @ torch.linalg.inv(torch.linalg.inv(S) + H) @ J.T


def log_normal(x: Tensor, cov: Tensor) -> Tensor:
    return -0.5 * (torch.slogdet(cov)[1] + x @ torch.linalg.inv(cov) @ x + len(x) * log(2 * pi))


def kappa(mean: Tensor, cov: Tensor) -> float:
    """E TV(x) for x ~ N(mean, cov): every difference by numerical integration."""
    h, w = mean.shape
    total, flat = 0.0, mean.reshape(-1)
    t = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * t**2) / sqrt(2 * pi)
    for i in range(h):
        for j in range(w):
            here = i * w + j
            for there in ([here + 1] if j + 1 < w else []) + ([here + w] if i + 1 < h else []):
                q = float(cov[here, here] + cov[there, there] - 2 * cov[here, there])
                m = float(flat[here] - flat[there])
                total += float(torch.trapezoid((m + sqrt(q) * t).abs() * density, t))
    return total


def patch_score(deviation: Tensor, cov: Tensor, shape: tuple[int, int], side: int) -> float:
    """Σ over patches, one at a time."""
    h, w = shape
    at = torch.arange(h * w).reshape(h, w)
    total = 0.0
    for top in range(0, h - side + 1, side):
        bottom = h if top + 2 * side > h else top + side
        for left in range(0, w - side + 1, side):
            right = w if left + 2 * side > w else left + side
            pixels = at[top:bottom, left:right].reshape(-1)
            total += float(log_normal(deviation[pixels], cov[pixels][:, pixels]))
    return total


def blocks(network: Any) -> dict[str, str]:
    """Weight → block, as a U-Net of ours names them."""
    return {name: block for block, names in network.prior_blocks().items() for name in names}
