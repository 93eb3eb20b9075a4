"""After tuning, error bars do not depend on the scale of weights that have no scale (Antorán et al., 2022, prop. 3)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.priors.normalised import find_normalised_groups
from oracle import assert_close
from test_normalised import SCALED, Scaled, as_double, made, rescaled, seeded, targets, without_eps

FIVE = [case for case in SCALED if case.name not in ("GPT, QK-norm", "weight_norm")]


def many(case: Scaled) -> Tensor:
    """Enough data for an optimum inside the bounds."""
    x = as_double(case.x())
    return torch.randn(48, *x.shape[1:], generator=seeded(4), dtype=torch.float64)


def tuned(model: nn.Module, x: Tensor, y: Tensor, groups: str) -> tuple[Tensor, Tensor]:
    posterior = lw.fit(model, (x, y), "regression", structure="full")
    outputs = lw.tune(posterior, (x, y), groups=groups, predictive_mean="linear_mode").outputs(x[:6])
    return outputs.mean, outputs.var


@pytest.mark.parametrize("k", [0.1, 10.0])
@pytest.mark.parametrize("case", FIVE, ids=lambda case: case.name)
def test_the_tuned_predictive_does_not_move_with_the_scale(case: Scaled, k: float):
    model, x = without_eps(made(case.build)), many(case)
    y = targets(model, x)
    other = copy.deepcopy(model)
    for group in find_normalised_groups(model, x[:8]):
        rescaled(other, case, group.names, k)
    assert_close(other.eval()(x).detach(), model.eval()(x).detach(), rtol=1e-9)
    for a, b in zip(tuned(model, x, y, "normalised"), tuned(other, x, y, "normalised"), strict=True):
        assert_close(b, a, rtol=1e-6)
    shared = [tuned(m, x, y, "one")[1] for m in (model, other)]
    assert float(((shared[1] - shared[0]).abs() / shared[0]).max()) > 0.01


def test_a_normalised_network_gets_its_groups_of_its_own_accord():
    case = FIVE[0]
    model, x = without_eps(made(case.build)), many(case)
    y = targets(model, x)
    posterior = lw.fit(model, (x, y), "regression", structure="full")
    chosen = lw.tune(posterior, (x, y))
    assert chosen.prior.group_names == lw.prior(model, groups="normalised", data=x).group_names
    assert any("normalised" in finding.value for finding in chosen.diagnose().findings)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    assert len(lw.tune(lw.fit(plain, (x, y), "regression")).prior.precisions) == 1
