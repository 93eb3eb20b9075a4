"""Targets without noise: the evidence falls towards no noise and no prior, and tuning ends at what can be resolved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw

WAYS: list[dict[str, Any]] = [{}, {"mode": "network"}, {"groups": "layer"}, {"by": "fixed_point"}, {"budget": "exact"}]


def untrained() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 50)[:, None]
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), (x, torch.sin(x))


@pytest.mark.parametrize("structure", ["full", "block", "kron"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_tuning_gives_a_posterior_that_answers(structure: str, options: dict[str, Any]) -> None:
    model, data = untrained()
    tuned = lw.tune(lw.fit(model, data, "regression", structure=structure), data, **options)
    assert torch.isfinite(tuned.log_evidence())
    assert torch.isfinite(tuned.predict(data[0]).variance).all()
    assert torch.isfinite(tuned.marginal_variance()).all()


def test_it_is_said_that_the_prior_was_raised() -> None:
    model, data = untrained()
    tuned = lw.tune(lw.fit(model, data, "regression", structure="full"), data)
    assert any("cannot resolve" in words for words in tuned.left_open)
    assert "cannot resolve" in str(tuned.diagnose())
    least, largest = float(tuned.prior.precisions.min()), float(tuned.curvature.norm())
    assert least == pytest.approx(1e-14 * largest)


def test_a_prior_that_is_resolved_stays() -> None:
    model, (x, y) = untrained()
    noise = 0.1 * torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    tuned = lw.tune(lw.fit(model, (x, y + noise), "regression", structure="full"), (x, y + noise))
    assert tuned.left_open == ()
