"""diagnose() gives advice, and none that was taken already."""

# ruff: noqa: E501 (a table reads by rows)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.posterior.diagnosis import Finding

torch.manual_seed(0)
X = torch.randn(60, 2)
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0.5)
HELD_OUT = (X[40:], LABELS[40:])
DATA = (X[:40], LABELS[:40])


def network(n_outputs: int = 3, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, n_outputs))
    with torch.no_grad():
        model[2].weight.mul_(scale)
    return model


def sure() -> nn.Module:
    """Trained without weight decay until it is surer than it should be."""
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(400):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(DATA[0]), DATA[1]).backward()
        optimiser.step()
    return model


def fitted(**options: Any) -> lw.Posterior:
    return lw.fit(sure(), DATA, "classification", **options)


def far() -> lw.Posterior:
    """Of a network that was hardly trained."""
    return lw.fit(network(scale=3.0), DATA, "classification")


def many_outputs(**options: Any) -> lw.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 70), nn.Softplus())
    return lw.fit(model, (X, torch.arange(60) % 70), "classification", structure="diag", **options)


def found(posterior: lw.Posterior, name: str) -> Finding | None:
    return next((f for f in posterior.diagnose().findings if f.name == name), None)


@dataclass(frozen=True)
class Row:
    """A finding, its advice before, what was done, and whether it is still a concern."""

    name: str
    before: Callable[[], lw.Posterior]
    advice: str
    taken: Callable[[], lw.Posterior]


ROWS = {
    "tune": Row("hyperparameters", fitted, "lw.tune(posterior", lambda: lw.tune(fitted())),
    "choose a prior": Row("hyperparameters", fitted, "lw.tune(posterior", lambda: fitted().with_prior(1.0)),
    "tune for the linear mode": Row("gradient norm at the weights", far, "linear model's own mode", lambda: lw.tune(far(), validation=HELD_OUT)),
    "the linear mode, after the classic evidence": Row("gradient norm at the weights", lambda: lw.tune(far(), mode="network"), "lw.tune(posterior, data) takes it", lambda: lw.tune(far())),
    "held-out data for weights off the mode": Row("gradient norm at the weights", lambda: lw.tune(far()), "validation=", lambda: lw.tune(far(), validation=HELD_OUT)),
    "refine": Row("gradient norm at the weights", far, "evidence at them is only indicative", lambda: lw.refine(far())),
    "held-out data for the mean": Row("linear mode", lambda: lw.tune(far()), "validation=", lambda: lw.tune(far(), validation=HELD_OUT)),
    "held-out data for the scale": Row("predictions of training data", lambda: lw.tune(fitted(), curvature_at="network"), "validation=", lambda: lw.tune(fitted(), validation=HELD_OUT)),
    "held-out data for an averaged curvature": Row("curvature", lambda: lw.tune(fitted(), curvature_at="posterior"), "validation=", lambda: lw.tune(fitted(), curvature_at="posterior", validation=HELD_OUT)),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_advice_that_was_taken_is_not_given_again(row: Row) -> None:
    before, after = found(row.before(), row.name), found(row.taken(), row.name)
    assert before is not None and before.concern and row.advice in before.advice
    assert after is None or row.advice not in after.advice


def test_a_single_group_at_a_bound_is_not_told_to_be_fewer() -> None:
    posterior = fitted().with_prior(1e-14)
    (finding,) = (f for f in posterior.diagnose().findings if f.name.startswith("prior group"))
    assert "fewer" not in finding.advice and "with_prior" in finding.advice


def test_several_groups_at_a_bound_are() -> None:
    model = sure()
    posterior = lw.fit(model, DATA, "classification", prior=lw.prior(model, {"0": 1e-14, "2": 1.0}, groups="layer"))
    (finding,) = (f for f in posterior.diagnose().findings if f.name == "prior group '0'")
    assert "fewer groups" in finding.advice


def test_a_posterior_of_held_out_data_advises_no_held_out_data() -> None:
    for posterior in (lw.tune(fitted(), validation=HELD_OUT), lw.tune(far(), by="validation", validation=HELD_OUT)):
        text = str(posterior.diagnose())
        assert "validation=" not in text and "lw.tune(posterior, train_loader)" not in text


def test_links_are_advised_where_draws_are_averaged_only() -> None:
    finding = found(many_outputs(), "predictions")
    assert finding is not None and 'link="mc"' in finding.advice
