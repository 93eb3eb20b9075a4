"""Ranking by evidence, and what diagnose() says after tuning."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.posterior.findings import dimension_by_layer

G = torch.Generator().manual_seed(1)
X = torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
Y = torch.sin(2 * X) + 0.1 * torch.randn(60, 1, generator=G, dtype=torch.float64)


@cache
def trained(h: int, steps: int = 400, structure: str = "full") -> lw.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, h), nn.Tanh(), nn.Linear(h, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(X), Y).backward()
        optimiser.step()
    return lw.tune(lw.fit(model, (X, Y), "regression", structure=structure), (X, Y))


def test_models_are_ranked_by_their_evidence():
    table = lw.compare({"too small": trained(1), "fine": trained(8)})
    assert [rank.name for rank in table.ranks] == ["fine", "too small"]
    assert table.best.log_evidence == pytest.approx(float(trained(8).log_evidence()))
    assert table.ranks[1].behind == pytest.approx(float(trained(8).log_evidence() - trained(1).log_evidence()))
    assert sum(rank.probability for rank in table.ranks) == pytest.approx(1)
    assert table.caveats == () and "too small" in str(table)


def test_lists_are_numbered():
    assert {rank.name for rank in lw.compare([trained(1), trained(8)]).ranks} == {"0", "1"}


def test_other_structures_and_other_points_are_warned_of():
    classic = lw.tune(trained(8), mode="network")
    with pytest.warns(UserWarning, match="different structures"):
        lw.compare([trained(8), trained(8, structure="diag")])
    with pytest.warns(UserWarning, match="different points"):
        assert lw.compare([trained(8), classic]).caveats


@pytest.mark.parametrize(("given", "error", "words"), [
    ([], lw.InputError, "at least one"),
    (3, lw.InputTypeError, "list of posteriors"),
    ([3], lw.InputTypeError, "entry '0' is a int"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(given: object, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        lw.compare(given)


def test_other_data_cannot_be_compared():
    model = nn.Linear(1, 1).double()
    few = lw.fit(model, (X[:10], Y[:10]), "regression")
    with pytest.raises(lw.InputError, match="same data"):
        lw.compare([few, lw.fit(model, (X, Y), "regression")])


# --- diagnosis ----------------------------------------------------------------------------------------------------


def finding(posterior: lw.Posterior, name: str):
    found = [f for f in posterior.diagnose().findings if f.name == name]
    assert len(found) == 1, [f.name for f in posterior.diagnose().findings]
    return found[0]


def test_a_network_that_is_too_small_is_said_to_be():
    line = lw.tune(lw.fit(nn.Linear(1, 1).double(), (X, Y), "regression", structure="full"), (X, Y)).with_prior(1e-3)
    assert "too small" in finding(line, "effective dimension").advice
    assert not finding(trained(40), "effective dimension").concern


def test_an_early_stopped_network_is_far_from_its_linear_mode():
    assert finding(trained(8, steps=3), "linear mode").concern
    assert finding(trained(8, steps=3), "gradient norm at the weights").concern


def test_a_confident_classifier_is_not_to_be_trusted_with_the_curvature_of_the_network():
    labels = (Y[:, 0] > 0).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(600):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(X), labels).backward()
        optimiser.step()
    fitted = lw.fit(model, (X, labels), "classification", structure="full")
    tuned = lw.tune(fitted, (X, labels), curvature_at="network")
    assert "unreliable" in finding(tuned, "predictions of training data").advice
    assert not finding(lw.tune(fitted, (X, labels)), "predictions of training data").concern  # averaged over them
    assert not finding(trained(8), "predictions of training data").concern


def test_weight_decay_is_read_off_the_weights():
    """At the minimum of loss + ½ λ‖θ‖² of a linear model the implied weight decay is λ."""
    x = torch.cat([X, torch.ones_like(X)], 1)
    noise, decay = 0.3, 2.5
    theta = torch.linalg.solve(x.T @ x / noise**2 + decay * torch.eye(2, dtype=torch.float64), x.T @ Y / noise**2)
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data = theta.T.clone()
    posterior = lw.fit(model, (x, Y), lw.Gaussian(noise_std=noise), prior=decay)
    found = finding(posterior, "weight decay implied by the weights")
    assert "2.5 (weight decay times N), prior precision 2.5" in found.value and not found.concern
    assert finding(posterior.with_prior(100.0), "weight decay implied by the weights").concern


def layers(posterior: lw.Posterior) -> Tensor:
    return torch.tensor([gamma for gamma, _ in dimension_by_layer(posterior).values()], dtype=torch.float64)


def test_effective_dimensions_by_layer_add_up():
    assert float(layers(trained(8)).sum()) == pytest.approx(float(trained(8).effective_dimension().sum()), rel=1e-8)
