"""Sums over all products a_i b_j of two lists, without visiting them.

For a function G that is smooth in the log of its argument, Σ_ij G(a_i b_j) is a sum over log a_i + log b_j. Each log is
spread over the grid points around it with the weights of Lagrange's interpolation; the weights of the sums are then the
convolution of the weights of both. With log(1 + e^s), whose nearest singularities are ±iπ, the error of twelve points a
sixteenth apart is below rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lapwing._types import Float, Tensor

_STEP = 1 / 16
_POINTS = 12


def products_on_grid(a: Float[Tensor, " i"], b: Float[Tensor, " j"]) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """Values λ_k and weights w_k with Σ_ij G(a_i b_j) = Σ_k w_k G(λ_k), where G(0) = 0; zeros are left out."""
    first_a, weights_a = _spread(a[a > 0].log())
    first_b, weights_b = _spread(b[b > 0].log())
    padding = len(weights_b) - 1
    weights = F.conv1d(weights_a[None, None], weights_b.flip(0)[None, None], padding=padding)[0, 0]
    grid = torch.arange(len(weights), dtype=torch.float64, device=a.device)
    return (first_a + first_b + _STEP * grid).exp(), weights


def _spread(logs: Float[Tensor, " i"]) -> tuple[Tensor, Float[Tensor, " k"]]:
    """Where the grid begins, and the weights of its points: Σ_i L_k(log_i)."""
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
