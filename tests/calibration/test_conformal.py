"""Conformal sets: quantiles against their definition, coverage by simulation, shapes, and refusals in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.calibration.order_statistics import quantile, rank

FLOAT64 = torch.float64
Quantile = Callable[[Tensor, float], Tensor]


def brute_quantile(scores: list[float], level: float) -> float:
    """The least q for which at least (n + 1) level of the scores and +∞ are ≤ q."""
    ordered = [*sorted(scores), math.inf]
    return next(q for q in ordered if sum(s <= q for s in ordered) >= round((len(scores) + 1) * level, 9))


@pytest.mark.parametrize("n", [1, 5, 8, 9, 10, 19, 99, 100])
@pytest.mark.parametrize("level", [0.05, 0.5, 0.55, 0.7, 0.9, 0.95, 0.99])
def test_the_quantile_is_the_defined_one(n: int, level: float, generator: torch.Generator) -> None:
    scores = torch.randn(n, 2, generator=generator, dtype=FLOAT64).round(decimals=1)  # with ties
    expected = [brute_quantile(column.tolist(), level) for column in scores.T]
    assert quantile(scores, level).tolist() == expected


def test_ranks_are_those_of_the_level_as_written() -> None:
    assert rank(99, 0.55) == 55  # in floats 100 × 0.55 is 55.00000000000001
    assert rank(9, 0.9) == 9 and rank(8, 0.9) == 9
    assert all(rank(n, 0.07) == -(-7 * (n + 1) // 100) for n in range(300))


# --- on a posterior -------------------------------------------------------------------------------------------


@cache
def linear(n_outputs: int = 1) -> lw.Posterior:
    """A linear model of two inputs, whose predictive is Gaussian with a variance that depends on x."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(12, 2, generator=g, dtype=FLOAT64)
    Y = X @ torch.randn(2, n_outputs, generator=g, dtype=FLOAT64) + 0.3 * torch.randn(
        12, n_outputs, generator=g, dtype=FLOAT64
    )
    model = nn.Linear(2, n_outputs).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(X, Y).solution.T)
        model.bias.zero_()
    return lw.fit(model, (X, Y), lw.Gaussian(noise_std=0.3), structure="full", prior=0.1)


@cache
def classifier(n_classes: int = 3) -> lw.Posterior:
    g = torch.Generator().manual_seed(1)
    X, Y = torch.randn(40, 2, generator=g, dtype=FLOAT64), torch.randint(n_classes, (40,), generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, n_classes if n_classes > 2 else 1)).double()
    likelihood = "classification" if n_classes > 2 else "binary"
    return lw.fit(model, (X, Y), likelihood, structure="full", prior=1.0)


def numbers(n: int, n_outputs: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, generator=g, dtype=FLOAT64), torch.randn(n, n_outputs, generator=g, dtype=FLOAT64)


def labels(n: int, n_classes: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, generator=g, dtype=FLOAT64), torch.randint(n_classes, (n,), generator=g)


def test_intervals_are_scaled_by_the_posterior() -> None:
    posterior, (X, Y) = linear(2), numbers(30, 2)
    p = posterior.predict(X)
    scores = (Y - p.mean).abs() / p.std
    made = lw.conformal(posterior, (X, Y), level=0.8)
    q = torch.tensor([brute_quantile(column.tolist(), 0.8) for column in scores.T], dtype=FLOAT64)
    torch.testing.assert_close(made.quantile, q)
    x = numbers(5, seed=2)[0]
    (low, high), new = made.predict(x).interval, posterior.predict(x)
    torch.testing.assert_close(low, new.mean - q * new.std)
    torch.testing.assert_close(high, new.mean + q * new.std)
    assert made.coverage == 25 / 31 and made.n == 30


def test_label_sets_hold_what_is_as_probable_as_held_out_labels() -> None:
    posterior, (X, Y) = classifier(), labels(30)
    p = posterior.predict(X).probs
    q = brute_quantile((1 - p[torch.arange(30), Y]).tolist(), 0.8)
    made = lw.conformal(posterior, (X, Y), level=0.8)
    found = made.predict(X).labels
    assert found.dtype == torch.bool and found.shape == (30, 3)
    assert torch.equal(found, 1 - p <= q + 1e-12)


def test_one_logit_has_sets_of_two_labels() -> None:
    posterior, (X, Y) = classifier(2), labels(30, 2)
    found = lw.conformal(posterior, (X, Y), 0.9).predict(X).labels
    p1 = posterior.predict(X).probs.reshape(-1)
    p = torch.stack([1 - p1, p1], 1)
    q = brute_quantile((1 - p[torch.arange(30), Y]).tolist(), 0.9)
    assert found.shape == (30, 2)
    assert torch.equal(found, 1 - p <= q + 1e-12)


def test_too_few_held_out_data_give_infinite_sets() -> None:
    made = lw.conformal(linear(), numbers(8), 0.9)
    low, high = made.predict(numbers(3)[0]).interval
    assert bool(torch.isinf(low).all() and torch.isinf(high).all()) and made.coverage == 1
    assert bool(torch.isfinite(lw.conformal(linear(), numbers(9), 0.9).quantile).all())
    assert bool(lw.conformal(classifier(), labels(8), 0.9).predict(numbers(3)[0]).labels.all())


def test_held_out_data_come_as_people_have_them() -> None:
    X, Y = labels(30)
    expected = lw.conformal(classifier(), (X, Y)).quantile
    for held_out in (
        (X.numpy(), Y.numpy()),
        DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True),
        TensorDataset(X, Y),
        [(X[:11], Y[:11]), (X[11:], Y[11:])],
    ):
        torch.testing.assert_close(lw.conformal(classifier(), held_out).quantile, expected)


def test_ignored_labels_are_left_out() -> None:
    X, Y = labels(30)
    made = lw.conformal(classifier(), (torch.cat([X, X]), torch.cat([Y, torch.full_like(Y, -100)])))
    assert made.n == 30
    torch.testing.assert_close(made.quantile, lw.conformal(classifier(), (X, Y)).quantile)


def test_counts_have_intervals() -> None:
    X, Y = labels(30)
    posterior = lw.fit(nn.Linear(2, 1).double(), (X, Y[:, None].double()), "count", structure="full")
    low, high = lw.conformal(posterior, (X, Y[:, None].double())).predict(X).interval
    assert low.shape == high.shape == (30, 1) and bool((low <= high).all())


# --- finite samples: coverage is what the ranks say ---------------------------------------------------------------

N_SETS, N_HELD, LEVEL = 2_000, 37, 0.9


def coverage_is_exact(of: Quantile, n_sets: int = N_SETS) -> bool:
    """One new score against the quantile of every simulated data set: within three standard errors of k / (n + 1)."""
    g = torch.Generator().manual_seed(7)
    scores = torch.randn(N_HELD + 1, n_sets, generator=g, dtype=FLOAT64).abs()
    covered = (scores[-1] <= of(scores[:-1], LEVEL)).double().mean()
    exact = math.ceil((N_HELD + 1) * LEVEL) / (N_HELD + 1)
    return bool((covered - exact).abs() <= 3 * math.sqrt(exact * (1 - exact) / n_sets))


def off_by(error: int) -> Quantile:
    def wrong(scores: Tensor, level: float) -> Tensor:
        return scores.sort(0).values[math.ceil((len(scores) + 1) * level) - 1 + error]

    return wrong


@pytest.mark.statistical
def test_quantiles_cover_exactly() -> None:
    assert coverage_is_exact(quantile)
    assert coverage_is_exact(off_by(0))


@pytest.mark.statistical
@pytest.mark.parametrize("error", [-1, 1])
def test_a_quantile_of_the_wrong_rank_is_noticed(error: int) -> None:
    assert not coverage_is_exact(off_by(error))


@pytest.mark.statistical
@pytest.mark.parametrize("wrong", [False, True], ids=["as it is", "off by one"])
def test_intervals_of_a_posterior_cover_exactly(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The posterior is fixed and wrong about the noise, which depends on x; the coverage is exact all the same."""
    if wrong:
        monkeypatch.setattr("lapwing.calibration.sets.quantile", off_by(-1))
    posterior, g, covered = linear(), torch.Generator().manual_seed(11), 0
    with torch.no_grad():
        for _ in range(N_SETS):
            x = 2 * torch.randn(N_HELD + 1, 2, generator=g, dtype=FLOAT64)
            y = x[:, :1] ** 2 + x[:, 1:].abs() * torch.randn(N_HELD + 1, 1, generator=g, dtype=FLOAT64)
            low, high = lw.conformal(posterior, (x[:-1], y[:-1]), LEVEL).predict(x[-1:]).interval
            covered += int(low <= y[-1] <= high)
    exact = math.ceil((N_HELD + 1) * LEVEL) / (N_HELD + 1)
    error = 3 * math.sqrt(exact * (1 - exact) / N_SETS)
    assert (abs(covered / N_SETS - exact) <= error) is not wrong


@pytest.mark.statistical
def test_label_sets_of_a_posterior_cover_exactly() -> None:
    """Scores are continuous because inputs are, so no two are equal."""
    posterior, g, covered = classifier(), torch.Generator().manual_seed(12), 0
    n = 500
    with torch.no_grad():
        for _ in range(n):
            x = 2 * torch.randn(N_HELD + 1, 2, generator=g, dtype=FLOAT64)
            y = torch.randint(3, (N_HELD + 1,), generator=g)
            covered += int(lw.conformal(posterior, (x[:-1], y[:-1]), LEVEL).predict(x[-1:]).labels[0, y[-1]])
    exact = math.ceil((N_HELD + 1) * LEVEL) / (N_HELD + 1)
    assert abs(covered / n - exact) <= 3 * math.sqrt(exact * (1 - exact) / n)


# --- refusals ----------------------------------------------------------------------------------------------------


class Sequences(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, nn.Linear(2, math.prod(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(len(x), *self.shape)


def structured(likelihood: Any, shape: tuple[int, ...], y: Tensor) -> lw.Posterior:
    return lw.fit(Sequences(*shape), (torch.randn(6, 2), y), likelihood, structure="diag")


def outside() -> Any:
    return numbers(9)[0], torch.full((9,), 5)


def tokens() -> Any:
    return torch.randn(6, 2), torch.randint(3, (6, 4))


def several() -> Any:
    return torch.randn(6, 2), torch.randint(2, (6, 3)).float()


REFUSED = {
    "a model": (lambda: lw.conformal(nn.Linear(2, 1), numbers(9)), TypeError, "expected a Posterior"),  # type: ignore[arg-type]
    "level 1": (lambda: lw.conformal(linear(), numbers(9), 1.0), ValueError, "between 0 and 1"),
    "level 90": (lambda: lw.conformal(linear(), numbers(9), 90), ValueError, "between 0 and 1"),
    "no targets": (lambda: lw.conformal(linear(), numbers(9)[0]), TypeError, "held_out: expected"),
    "empty": (lambda: lw.conformal(linear(), []), ValueError, "no batch"),
    "labels outside": (lambda: lw.conformal(classifier(), outside()), ValueError, "labels in"),
    "shapes": (lambda: lw.conformal(linear(), (numbers(9)[0], torch.randn(9, 3))), ValueError, "never broadcast"),
    "all ignored": (
        lambda: lw.conformal(classifier(), (numbers(9)[0], torch.full((9,), -100))),
        ValueError,
        "ignore_index",
    ),
    "tokens": (
        lambda: lw.conformal(structured("classification", (4, 3), tokens()[1]), tokens()),
        ValueError,
        "one per position",
    ),
    "several labels": (
        lambda: lw.conformal(structured("multilabel", (3,), several()[1]), several()),
        ValueError,
        "multilabel",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case: str) -> None:
    call, kind, words = REFUSED[case]
    with pytest.raises(lw.LapwingError, match=words) as caught:
        call()
    assert isinstance(caught.value, kind)
