"""What the literature reports, asserted: sampled networks underfit, their linearisation does not, and doubt grows
away from the data (Immer, Korzepa and Bauer, 2021).

Two crescents are made here. With LAPWING_DATA naming a directory that holds uci_classification.npz (`banana_x`,
`banana_y`), the banana set of that literature goes through the same tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import pi
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import lapwing as lw

DATA = Path(os.environ["LAPWING_DATA"]) / "uci_classification.npz" if "LAPWING_DATA" in os.environ else None
DATASETS = ["crescents", "banana"] if DATA is not None and DATA.exists() else ["crescents"]
PRECISIONS = {"crescents": 0.3, "banana": 1.0}


def crescents(n: int, noise: float = 0.35) -> tuple[Tensor, Tensor]:
    """Two interlocking half circles with noise, standardised; labels alternate."""
    g = torch.Generator().manual_seed(0)
    angle = pi * torch.rand(n, generator=g).double()
    y = (torch.arange(n) % 2).double()[:, None]
    arc = torch.stack([angle.cos(), angle.sin()], 1)
    x = torch.where(y > 0, torch.tensor([1.0, 0.4], dtype=torch.float64) - arc, arc)
    x = x + noise * torch.randn(n, 2, generator=g).double()
    return (x - x.mean(0)) / x.std(0), y


def banana(n: int) -> tuple[Tensor, Tensor]:
    with np.load(DATA) as stored:
        x, y = stored["banana_x"][:n], stored["banana_y"][:n]
    return torch.as_tensor(x).double(), torch.as_tensor(y).double()[:, None]


def tanh_network(width: int, depth: int) -> nn.Module:
    widths = [2, *[width] * depth]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(width, 1)).double()


def train(model: nn.Module, x: Tensor, y: Tensor, precision: float, steps: int = 300) -> None:
    """Full-batch L-BFGS on the sum of the NLL and ½ δ ‖θ‖²: the objective whose curvature the posterior is."""
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        weights = sum(p.square().sum() for p in model.parameters())
        loss = -logsigmoid((2 * y - 1) * model(x)).sum() + precision / 2 * weights
        loss.backward()
        return loss

    optimiser.step(closure)


@dataclass(frozen=True)
class Run:
    """A trained network with its posterior, and its predictions at data it has not seen."""

    posterior: lw.Posterior
    x: Tensor
    y: Tensor

    @cached_property
    def glm(self) -> lw.Prediction:
        return self.posterior.predict(self.x)

    @cached_property
    def bnn(self) -> lw.Prediction:
        return self.posterior.predict(self.x, predictive="bnn", n_samples=200)

    @cached_property
    def logits(self) -> Tensor:
        return self.posterior.outputs(self.x).mean

    def nll(self, prediction: lw.Prediction) -> float:
        return -float(prediction.log_prob(self.y).mean())

    @property
    def map_nll(self) -> float:
        return -float(logsigmoid((2 * self.y - 1) * self.logits).mean())

    def far(self, distance: float = 4.0) -> Tensor:
        """A ring at least this far from every datum."""
        angle = torch.linspace(0, 2 * pi, 65, dtype=torch.float64)[:-1]
        return (self.x.norm(dim=1).max() + distance) * torch.stack([angle.cos(), angle.sin()], 1)


@cache
def run(data: str, width: int, depth: int, precision: float | None = None, n: int = 1000) -> Run:
    x, y = crescents(2 * n) if data == "crescents" else banana(2 * n)
    precision = PRECISIONS[data] if precision is None else precision
    model = tanh_network(width, depth)
    train(model, x[:n], y[:n], precision)
    posterior = lw.fit(model, (x[:n], y[:n]), "binary", prior=precision, structure="full")
    return Run(posterior, x[n:], y[n:])


def confidence(prediction: lw.Prediction) -> float:
    """Mean distance of the probability from one half."""
    return float((prediction.probs - 0.5).abs().mean())


NETWORKS = [pytest.param(20, 1, id="1x20"), pytest.param(50, 2, id="2x50")]


@pytest.mark.parametrize("data", DATASETS)
@pytest.mark.parametrize(("width", "depth"), NETWORKS)
class TestCrescents:
    def test_the_linearised_predictive_beats_the_sampled_network(self, data: str, width: int, depth: int):
        r = run(data, width, depth)
        assert r.nll(r.glm) < r.nll(r.bnn) - 0.1
        assert r.nll(r.glm) < r.map_nll + 0.02
        assert float((r.glm.label == r.y).double().mean()) > 0.85

    def test_the_sampled_network_is_washed_out(self, data: str, width: int, depth: int):
        """Its probabilities crowd around one half on the very data it was fitted to describe."""
        r = run(data, width, depth)
        assert confidence(r.bnn) < 0.6 * confidence(r.glm)
        assert confidence(r.glm) > 0.3
        if depth > 1:
            assert float(((r.bnn.probs - 0.5).abs() < 0.2).double().mean()) > 0.95

    def test_epistemic_uncertainty_grows_away_from_the_data(self, data: str, width: int, depth: int):
        r = run(data, width, depth)
        ring = r.far()
        assert float(torch.cdist(ring, r.x).min()) >= 4
        away = r.posterior.predict(ring)
        assert float(away.class_variance.epistemic.median()) >= 5 * float(r.glm.class_variance.epistemic.median())
        assert float(away.epistemic.median()) >= 5 * float(r.glm.epistemic.median())

    def test_aleatoric_uncertainty_sits_on_the_boundary(self, data: str, width: int, depth: int):
        """E[p − p²] is at most a quarter, nearly that where the logit vanishes, and small where the label is clear."""
        r = run(data, width, depth)
        noise = r.glm.class_variance.aleatoric
        assert float(noise.max()) <= 0.25
        boundary, clear = r.logits.abs() < 0.3, r.logits.abs() > 3
        assert float(noise[boundary].min()) > 0.18
        assert float(noise[clear].max()) < 0.1
        assert bool(boundary.flatten()[noise.flatten().topk(3).indices].all())


@pytest.mark.slow
@pytest.mark.parametrize("data", DATASETS)
@pytest.mark.parametrize("precision", [0.3, 1.0, 5.0])
def test_at_every_prior_precision(data: str, precision: float):
    r = run(data, 50, 2, precision, n=2000)
    assert r.nll(r.glm) < r.nll(r.bnn) - 0.1
    assert r.nll(r.glm) < r.map_nll + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("data", DATASETS)
def test_depth_harms_the_sampled_network_only(data: str):
    """The linearised predictive is as good at any depth; the sampled network falls to the level of a coin, log 2.

    That it worsens layer by layer is reported for the banana set. On the crescents one layer is at 0.65 already, so
    there is no room for an order there (0.65, 0.72, 0.67).
    """
    runs = [run(data, 50, depth, 1.0, n=2000) for depth in (1, 2, 3)]
    glm, bnn = [r.nll(r.glm) for r in runs], [r.nll(r.bnn) for r in runs]
    assert max(glm) - min(glm) < 0.03
    assert max(glm) < 0.3 < 0.65 < min(bnn[1:])
    if data == "banana":
        assert bnn[0] < bnn[1] < bnn[2]


# --- one dimension: a step ------------------------------------------------------------------------------------------


class Step(nn.Module):
    """f = 5 tanh(w x + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return 5 * torch.tanh(self.w * x + self.b)


@pytest.mark.parametrize("variance", [1.0, 4.0])
def test_a_sampled_step_saturates_and_its_linearisation_does_not(variance: float):
    """Draws whose slope has the wrong sign predict the mirror image, so the average stays below P(w > 0)."""
    x = torch.tensor([-2, -1.5, -1, 1, 1.5, 2], dtype=torch.float64)[:, None]
    y = (x > 0).double()
    model = Step()
    train(model, x, y, 1 / variance)
    posterior = lw.fit(model, (x, y), "binary", prior=1 / variance, structure="full")
    far = torch.tensor([[2.0], [4.0], [20.0]], dtype=torch.float64)
    glm, bnn = posterior.predict(far).probs, posterior.predict(far, predictive="bnn", n_samples=1000).probs
    wrong_sign = float(torch.special.ndtr(-posterior.mean[0] / posterior.marginal_variance()[0].sqrt()))
    assert wrong_sign > 0.1
    assert float(bnn.max()) < 1 - wrong_sign + 0.04
    assert float(glm.min()) > 0.95
    assert bool((bnn < glm - 0.1).all())
