"""How the held-out search chooses among candidates: scales are averaged, and a mean is moved for more than noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.predictive.link_rules import DEFAULT
from lapwing.tuning.validation.scoring import HeldOutScore, _best_log_factor, _cautious_log_factor
from lapwing.tuning.validation.search import NETWORK_SCALE, Candidate, averaged

SCALES = [1e-2, 1e-1, 1.0, 1e1, 1e2]


def candidate(scale: float, nll: float, mean: str = "network") -> Candidate:
    return Candidate(0, scale, mean, HeldOutScore(nll, 1.0, DEFAULT))


def chosen(nll_of: dict[float, float], n: int, moved: Tensor | None = None) -> Candidate:
    """Among the network's mean at every scale and, where its log probabilities are given, the linear mode at one."""
    candidates = [candidate(s, nll) for s, nll in nll_of.items()]
    if moved is not None:
        candidates.append(candidate(1.0, -float(moved.mean()), "linear"))

    def rows(c: Candidate) -> Tensor:
        return torch.full((n,), -c.score.nll) if moved is None or c.mean == "network" else moved

    return averaged(candidates, rows)


def test_many_rows_pick_the_best_scale() -> None:
    nll = {s: 1.0 + 0.1 * (math.log10(s) - 1) ** 2 for s in SCALES}
    assert chosen(nll, 10_000).scale == 10.0


def test_few_rows_that_prefer_no_spread_by_a_hair_keep_some() -> None:
    """0.01 nats a row over ten rows are nothing: the best is no spread at all, the average is not."""
    nll = dict.fromkeys(SCALES, 1.0) | {NETWORK_SCALE: 0.99}
    assert min(nll, key=lambda s: nll[s]) == NETWORK_SCALE
    assert 0.1 <= chosen(nll, 10).scale <= 10.0
    assert chosen(nll, 100_000).scale == NETWORK_SCALE


@pytest.mark.parametrize(("gain", "noise", "moves"), [(0.5, 0.1, True), (0.5, 10.0, False), (0.02, 0.0, False)])
def test_the_mean_is_moved_for_more_than_its_noise_and_its_cost(gain: float, noise: float, moves: bool) -> None:
    """40 rows: a clear gain, the same gain in much noise, and one below the two nats that another mean costs."""
    d = torch.linspace(-1, 1, 40)
    moved = -1.0 + gain + noise * d / d.std()
    assert (chosen(dict.fromkeys(SCALES, 1.0), 40, moved).mean == "linear") is moves


def test_row_scores_add_up_to_the_search_s_own_score() -> None:
    """For every likelihood: the mean over rows of the log probabilities is minus the candidate's NLL."""
    from lapwing.data import as_batches
    from lapwing.tuning.validation import search
    from lapwing.tuning.validation.held_out import MOST_COMPARED, HeldOut, scaled

    torch.manual_seed(0)
    x = torch.randn(60, 2, dtype=torch.float64)
    targets = {
        "regression": (1, x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(60, 1)),
        "classification": (3, torch.arange(60) % 3),
        "binary": (1, torch.arange(60) % 2),
    }
    for likelihood, (n_outputs, y) in targets.items():
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, n_outputs)).double()
        posterior = lw.fit(model, (x[:40], y[:40]), likelihood)
        by_scale = {s: scaled(posterior, s) for s in (0.1, 10.0)}
        precisions = [each.precision for each in by_scale.values()]
        data = HeldOut.of(posterior, as_batches((x[40:], y[40:])), precisions, [], MOST_COMPARED, False)
        free = likelihood == "regression"
        for c in search._all_candidates(posterior, data, list(by_scale), free):
            found = search._rows(data, c)
            assert len(found) == 20
            assert abs(float(found.mean()) + c.score.nll) < 1e-10, (likelihood, c)


def half_trained() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A network stopped far from its optimum, whose linear model does much better."""
    torch.manual_seed(0)
    x = 2 * torch.randn(240, 1)
    y = torch.sin(x) + 0.05 * torch.randn(240, 1)
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
    return model, (x[:120], y[:120]), (x[120:], y[120:])


def moved_mean(posterior: lw.Posterior) -> list[str]:
    return [str(f) for f in posterior.diagnose().findings if f.name == "mean of the predictions"]


def test_a_moved_mean_is_told_and_can_be_forbidden() -> None:
    model, train, held_out = half_trained()
    fitted = lw.fit(model, train, "regression")
    free = lw.tune(fitted, train, validation=held_out)
    kept = lw.tune(fitted, train, validation=held_out, mean="network")
    assert free.readout.shift is not None and "held-out data asked" in moved_mean(free)[0]
    assert kept.readout.shift is None and not moved_mean(kept)
    x = held_out[0]
    assert torch.equal(kept.predict(x).mean, model(x).detach())
    assert not torch.allclose(free.predict(x).mean, model(x).detach(), atol=0.1)


@pytest.mark.parametrize("q", [0.0, 1e-3, 30.0, 200.0, 1e6])
@pytest.mark.parametrize("n", [1, 30, 3_000])
def test_the_noise_factor_minimises_its_score(q: float, n: int) -> None:
    log_a = _best_log_factor(q, n, 0.25)
    derivative = 0.5 * n - 0.5 * q * math.exp(-log_a) + max(-3.0, min(3.0, log_a / 0.25)) / 0.25
    assert abs(derivative) < 1e-8 * max(n, q, 1.0) or abs(log_a) > 39.9
    if n == 3_000 and q == 200.0:
        assert 0.5 < math.exp(log_a) / (q / n) < 4  # thousands of data overrule the prior


def test_an_outlier_is_no_noise() -> None:
    """30 residuals as large as the noise says and one ten times as large; against 30 that are all twice as large."""
    q = torch.linspace(0.2, 1.8, 30, dtype=torch.float64)
    outlier = torch.cat([q[:-1], torch.tensor([100.0], dtype=torch.float64)])
    assert _best_log_factor(float(outlier.sum()), 30, 0.25) > 0.5
    assert _cautious_log_factor(outlier, 1, 0.25) == 0.0
    assert _cautious_log_factor(4 * q, 1, 0.25) == _best_log_factor(float(4 * q.sum()), 30, 0.25)
    assert _cautious_log_factor(outlier[:1], 1, 0.25) == 0.0
