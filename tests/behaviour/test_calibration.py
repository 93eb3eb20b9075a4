"""Simulation-based calibration on the conjugate model: truths from the prior rank uniformly among posterior draws.

θ ~ N(0, I/δ), y = Xθ + σε, and the network is trained to its mode. Talts et al. (2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import lapwing as lw

N_WORLDS, N_DRAWS, N_NEW = 500, 99, 40
DELTA, NOISE, D, N = 0.7, 0.4, 3, 8


@dataclass(frozen=True)
class World:
    """One truth with the posterior of its data, asked about one direction of the weights and some new targets."""

    truth: Tensor  # a number: the weights along a direction
    mean: Tensor  # of the same number
    draws: Tensor  # (N_DRAWS,)
    y: Tensor  # (N_NEW,)
    centre: Tensor
    half_width: Tensor  # of the nominal 95 % interval


@cache
def worlds() -> tuple[World, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(_world(g) for _ in range(N_WORLDS))


def _world(g: torch.Generator) -> World:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    theta, X, x, direction = normal(D) / DELTA**0.5, normal(N, D), normal(N_NEW, D), normal(D)
    Y, y = X @ theta + NOISE * normal(N), x @ theta + NOISE * normal(N_NEW)
    model = nn.Linear(D, 1, bias=False).double()
    A = X.T @ X / NOISE**2 + DELTA * torch.eye(D, dtype=torch.float64)
    with torch.no_grad():
        model.weight[0] = torch.linalg.solve(A, X.T @ Y / NOISE**2)
    posterior = lw.fit(model, (X, Y[:, None]), lw.Gaussian(noise_std=NOISE), structure="full", prior=DELTA)
    low, high = posterior.predict(x).interval(0.95)
    middle, half = (low + high).squeeze(1) / 2, (high - low).squeeze(1) / 2
    draws = posterior.sample(N_DRAWS, g) @ direction
    return World(theta @ direction, posterior.mean @ direction, draws, y, middle, half)


def p_of_uniform_ranks(scale: float) -> float:
    """χ² of ten bins, for draws whose spread is multiplied by `scale`."""
    ranks = [int((w.mean + scale * (w.draws - w.mean) < w.truth).sum()) for w in worlds()]
    counts = torch.bincount(torch.tensor(ranks) * 10 // (N_DRAWS + 1), minlength=10)
    return float(scipy.stats.chisquare(counts.numpy()).pvalue)


def coverage(scale: float) -> float:
    inside = [(w.y - w.centre).abs() < scale * w.half_width for w in worlds()]
    return float(torch.cat(inside).double().mean())


@pytest.mark.statistical
def test_truths_rank_uniformly():
    assert p_of_uniform_ranks(1.0) > 0.01


@pytest.mark.statistical
def test_a_posterior_too_narrow_is_found_out():
    assert p_of_uniform_ranks(0.8) < 0.01


@pytest.mark.statistical
def test_intervals_cover_what_they_say():
    assert abs(coverage(1.0) - 0.95) < 0.01
    assert abs(coverage(0.8) - 0.95) > 0.01
