"""Sums over products of eigenvalues as convolutions of their logs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.linalg import log_grid, products_on_grid
from lapwing.operators import kronecker
from oracle import assert_close

RTOL = 1e-12
PRIORS = torch.logspace(-8, 8, 9, dtype=torch.float64)


def spread(n: int, decades: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 10 ** (-decades * torch.rand(n, generator=generator, dtype=torch.float64))


def sums(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the evidence and its derivatives ask for, at several priors."""
    q = values / (values + PRIORS[:, None])
    terms = [(values / PRIORS[:, None]).log1p(), q, q * q]
    return torch.stack([term @ weights for term in terms])


@pytest.mark.parametrize("decades", [0.0, 1e-3, 3.0, 13.0])
def test_sums_are_those_over_all_products(decades: float) -> None:
    a = torch.cat([spread(60, decades, 0), torch.zeros(5, dtype=torch.float64)])
    b = 1e3 * spread(40, 13.0, 1)
    products = (a[:, None] * b).flatten()
    assert_close(sums(*products_on_grid(a, b)), sums(products, torch.ones_like(products)), RTOL)


def test_too_few_points_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_grid, "_POINTS", 4)
    a, b = spread(60, 3.0, 0), spread(40, 3.0, 1)
    products = (a[:, None] * b).flatten()
    exact = sums(products, torch.ones_like(products))
    assert float(((sums(*products_on_grid(a, b)) - exact) / exact).abs().max()) > 1e-10


def test_without_curvature_there_is_nothing_to_sum() -> None:
    values, weights = products_on_grid(torch.zeros(3, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
    assert float(weights.abs().sum()) == 0.0 and bool(values.isfinite().all())


def test_tuning_finds_the_same_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(112, 3)).double()
    X, y = torch.randn(20, 1, 40, dtype=torch.float64), torch.arange(20) % 3
    fitted = lw.fit(model, [(X, y)], "classification", structure="kron")
    plain = lw.tune(fitted, mode="network")
    monkeypatch.setattr(kronecker, "_MANY_PRODUCTS", 1)
    tuned = lw.tune(fitted, mode="network")
    assert_close(tuned.prior.precisions, plain.prior.precisions, 1e-9)
    assert_close(torch.tensor(tuned.history[-1].score), torch.tensor(plain.history[-1].score), 1e-11)
    assert_close(tuned.log_evidence(), torch.tensor(tuned.history[-1].score, dtype=torch.float64), 1e-10)
    assert_close(fitted.curvature.trace(), fitted.curvature.diagonal().sum(), RTOL)
