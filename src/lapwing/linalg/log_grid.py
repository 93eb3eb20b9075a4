"""Sums Σ_ij G(a_i b_j) over all eigenvalues of a Kronecker product, without forming the products a_i b_j.

For G smooth in the logarithm of its argument, interpolate on a grid: each log a_i and log b_j is replaced by Lagrange
interpolation weights on the surrounding grid points. The grid weights of the sums log a_i + log b_j are then the
convolution of the two sets of weights, I + J grid points instead of I · J products. For G = log(1 + e^s), whose nearest
singularities are at s = ±iπ, the interpolation error with 12 points at spacing 1/16 is below rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lapwing._types import Float, Tensor

_STEP = 1 / 16
_POINTS = 12


def products_on_grid(a: Float[Tensor, " i"], b: Float[Tensor, " j"]) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """Values λ_k and weights w_k with Σ_ij G(a_i b_j) = Σ_k w_k G(λ_k) for G with G(0) = 0; zeros are skipped."""
    first_a, weights_a = _grid_weights(a[a > 0].log())
    first_b, weights_b = _grid_weights(b[b > 0].log())
    padding = len(weights_b) - 1
    # conv1d computes a cross-correlation; flipping one argument makes it a convolution.
    weights = F.conv1d(weights_a[None, None], weights_b.flip(0)[None, None], padding=padding)[0, 0]
    grid = torch.arange(len(weights), dtype=torch.float64, device=a.device)
    return (first_a + first_b + _STEP * grid).exp(), weights


def _grid_weights(logs: Float[Tensor, " i"]) -> tuple[Tensor, Float[Tensor, " k"]]:
    """First grid point, and the total Lagrange weight of each point, Σ_i L_k(log_i)."""
    if not len(logs):
        return logs.new_zeros(()), logs.new_zeros(1)
    first = logs.min() - _POINTS * _STEP
    at = (logs - first) / _STEP
    left = at.floor().long() - (_POINTS // 2 - 1)
    points = torch.arange(_POINTS, device=logs.device)
    weights = logs.new_zeros(int(left.max()) + _POINTS)
    return first, weights.index_add(0, (left[:, None] + points).flatten(), _lagrange(at - left).flatten())


def _lagrange(t: Float[Tensor, " i"]) -> Float[Tensor, "i k"]:
    """L_k(t) = Π_{j≠k} (t − j)/(k − j) for the points 0 … m − 1."""
    points = torch.arange(_POINTS, dtype=t.dtype, device=t.device)
    itself = torch.eye(_POINTS, dtype=torch.bool, device=t.device)
    ratios = (t[:, None, None] - points) / torch.where(itself, 1.0, points[:, None] - points)
    return torch.where(itself, 1.0, ratios).prod(-1)
