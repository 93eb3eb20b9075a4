"""Density of a count whose log rate is Gaussian: log E[Poisson(y | e^f)], f ~ N(m, v)."""

from __future__ import annotations

from math import log, pi

import torch

from lapwing._types import Tensor
from lapwing.predictive.links import panels

_EDGES = (0.0, 1.5, 3.0, 5.0, 8.0, 12.0, 20.0, 40.0)  # panel edges, in units of each scale
_NEWTON_STEPS = 60  # far more than needed: convergence is quadratic from the right of the root


def log_mean_poisson(counts: Tensor, m: Tensor, v: Tensor, n_nodes: int = 14) -> Tensor:
    """log ∫ Poisson(y | e^f) N(f; m, v) df for any variance; all arguments of one shape, float64.

    The integrand is log-concave. Gauss–Legendre panels around its mode f̂ resolve it on three scales: its own,
    1/√(e^f̂ + 1/v); the Gaussian's, √v; and the likelihood's, 1/√(y + 1). Gauss–Hermite nodes would miss it for large
    v.
    """
    v = v.clamp(min=torch.finfo(v.dtype).tiny)
    mode = _mode(counts, m, v)
    scales = torch.stack([(mode.exp() + 1 / v).rsqrt(), v.sqrt(), (counts + 1).rsqrt()])
    steps = torch.tensor([-e for e in _EDGES[:0:-1]] + list(_EDGES), dtype=m.dtype, device=m.device)
    edges = mode + steps.reshape(-1, 1, *[1] * m.ndim) * scales
    # Beyond 40 units of the integrand's own scale nothing remains.
    f, lengths = panels(edges.flatten(0, 1), n_nodes)
    log_prior = -0.5 * ((f - m) ** 2 / v + v.log() + log(2 * pi))
    log_lik = counts * f - f.exp() - torch.lgamma(counts + 1)
    return torch.logsumexp(lengths.log() + log_prior + log_lik, 0)


def _mode(counts: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """The root of y − e^f − (f − m)/v, by Newton's method, which converges monotonically from the right."""
    f = torch.maximum(m, torch.log(counts + 0.5)) + 1
    f = torch.minimum(f, m + v * counts + 1)  # e^f > 0, so the root is below m + v y
    for _ in range(_NEWTON_STEPS):
        f = f - (f.exp() + (f - m) / v - counts) / (f.exp() + 1 / v)
    return f
