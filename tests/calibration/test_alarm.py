"""Alarms: p-values against their definition, false alarms by simulation, which posterior they listen to, refusals."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.calibration.epistemic import TWO_SIDED, WEIGHTS, undo_held_out_scale
from lapwing.calibration.order_statistics import combined_p_values, p_values
from untouched import untouched

FLOAT64 = torch.float64


def brute_p_value(held: list[float], score: float) -> float:
    return (1 + sum(s >= score for s in held)) / (len(held) + 1)


def brute_combined(held: Tensor, new: Tensor) -> float:
    """By the definition: all n + 1 data alike, then the rank of the last among them."""
    data = torch.cat([held, new[None]]).tolist()
    sums = []
    for datum in data:
        total = 0.0
        for k, (w, both) in enumerate(zip(WEIGHTS, TWO_SIDED, strict=True)):
            above = sum(other[k] >= datum[k] for other in data) / len(data)
            below = sum(other[k] <= datum[k] for other in data) / len(data)
            total += w * math.log(min(1.0, 2 * min(above, below)) if both else above)
        sums.append(total)
    totals = []
    for datum, total in zip(data, sums, strict=True):
        by_sum = sum(t <= total + 1e-12 for t in sums) / len(data)
        by_last = sum(other[3] >= datum[3] for other in data) / len(data)
        totals.append((round(min(by_sum, 3 * by_last), 12), round(by_sum + by_last, 12)))
    return sum(t <= totals[-1] for t in totals) / len(data)


@pytest.mark.parametrize("n", [1, 2, 9, 30])
def test_p_values_are_the_defined_ones(n: int, generator: torch.Generator) -> None:
    held, new = (torch.randn(m, generator=generator, dtype=FLOAT64).round(decimals=1) for m in (n, 20))
    expected = [brute_p_value(held.tolist(), score) for score in new.tolist()]
    torch.testing.assert_close(p_values(held, new), torch.tensor(expected, dtype=FLOAT64))


@pytest.mark.parametrize("n", [1, 5, 24])
def test_combined_p_values_are_the_defined_ones(n: int, generator: torch.Generator) -> None:
    held, new = (torch.randn(m, 4, generator=generator, dtype=FLOAT64).round(decimals=1) for m in (n, 15))
    expected = [brute_combined(held, row) for row in new]
    found = combined_p_values(held, new, WEIGHTS, TWO_SIDED)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=FLOAT64))


@pytest.mark.statistical
def test_combined_p_values_are_uniform_on_their_grid() -> None:
    """All n + 1 values have nearly the same chance, whatever the dependence between scores: ranks seldom tie."""
    g, n, n_sets = torch.Generator().manual_seed(3), 19, 2_000
    z = torch.randn(n_sets, n + 1, 3, generator=g, dtype=FLOAT64)
    z = torch.stack([z[..., 0], z[..., 0] + 0.5 * z[..., 1], z[..., 1] * z[..., 2], z[..., 2]], -1)
    p = torch.stack([combined_p_values(rows[:-1], rows[-1:], WEIGHTS, TWO_SIDED)[0] for rows in z])
    for k in range(1, n + 1):
        exact, share = k / (n + 1), float((p <= k / (n + 1) + 1e-9).double().mean())
        error = 3 * math.sqrt(exact * (1 - exact) / n_sets)
        assert exact - 0.02 - error <= share <= exact + error


# --- on a posterior -----------------------------------------------------------------------------------------------


def inputs(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 2, generator=generator, dtype=FLOAT64)


@cache
def posterior(kind: str = "classification") -> lw.Posterior:
    g = torch.Generator().manual_seed(123)
    X = inputs(80, g)
    Y = (X[:, 0] * X[:, 1] > 0).long() + (X[:, 0] > 1).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 1 if kind != "classification" else 3)).double()
    targets = Y if kind == "classification" else Y.clamp(max=1) if kind == "binary" else Y[:, None].double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = {
        "classification": nn.functional.cross_entropy,
        "regression": nn.functional.mse_loss,
        "binary": lambda f, y: nn.functional.binary_cross_entropy_with_logits(f[:, 0], y.double()),
    }
    for _ in range(150):
        optimiser.zero_grad()
        losses[kind](model(X), targets).backward()
        optimiser.step()
    return lw.fit(model, (X, targets), kind, structure="full", prior=1.0, progress=False)


@pytest.mark.parametrize("kind", ["classification", "binary", "regression"])
def test_far_inputs_raise_the_alarm_and_held_out_ones_do_not(kind: str, generator: torch.Generator) -> None:
    alarm = lw.alarm(posterior(kind), inputs(200, generator))
    near, far = alarm(inputs(200, generator)), alarm(inputs(50, generator) + 12)
    assert near.shape == (200,) and near.dtype == FLOAT64
    assert float((near <= 0.05).double().mean()) <= 0.1
    assert float(far.median()) <= 0.05
    assert float(far.min()) >= 1 / (alarm.n + 1)


@pytest.mark.statistical
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_false_alarms_are_at_most_their_level(kind: str) -> None:
    """2,000 data sets of held-out and new inputs; scores are continuous, so that few ranks tie."""
    g, n_sets, n, fitted = torch.Generator().manual_seed(5), 2_000, 39, posterior(kind)
    x = inputs(n_sets * (n + 1), g)
    with torch.no_grad():
        rows = lw.alarm(fitted, x)
        features = rows.features.reshape(n_sets, n + 1, -1)  # as calls on every set would find them
        p = torch.cat([rows.scorer.p_values(f[:-1], f[-1:]) for f in features])
        some = lw.alarm(fitted, x[:n])(x[n : n + 1])
    torch.testing.assert_close(some, p[:1])
    for level in (0.05, 0.1, 0.5):
        share = float((p <= level + 1e-9).double().mean())
        error = 3 * math.sqrt(level * (1 - level) / n_sets)
        assert level - 0.02 - error <= share <= level + error


def test_held_out_data_come_with_labels_or_without(generator: torch.Generator) -> None:
    X, x = inputs(40, generator), inputs(9, generator)
    expected = lw.alarm(posterior(), X)(x)
    for held_out in (
        X.numpy(),
        (X, torch.zeros(40).long()),
        DataLoader(TensorDataset(X, torch.zeros(40)), batch_size=7, shuffle=True),
        [(X[:11], torch.zeros(11)), (X[11:], torch.zeros(29))],
    ):
        torch.testing.assert_close(lw.alarm(posterior(), held_out)(x), expected)


def test_a_batch_does_not_matter(generator: torch.Generator) -> None:
    alarm, x = lw.alarm(posterior(), inputs(40, generator)), inputs(9, generator)
    torch.testing.assert_close(torch.cat([alarm(row[None]) for row in x]), alarm(x))


def test_a_loader_has_the_p_values_of_its_rows(generator: torch.Generator) -> None:
    alarm, x = lw.alarm(posterior(), inputs(40, generator)), inputs(30, generator)
    loaders = [DataLoader(TensorDataset(x), batch_size=7), DataLoader(TensorDataset(x, x), batch_size=7, shuffle=True)]
    for loader in loaders:
        assert torch.allclose(alarm(loader), alarm(x))


def test_the_model_is_left_as_it_was(generator: torch.Generator) -> None:
    fitted, X = posterior(), inputs(40, generator)
    with untouched(fitted.linearised.network.model):
        lw.alarm(fitted, X)(X)
        lw.conformal(fitted, (X, torch.zeros(40).long())).predict(X)


# --- whose posterior ------------------------------------------------------------------------------------------------


def validated(posterior: lw.Posterior, *, by: str = "evidence") -> lw.Posterior:
    """Held-out labels that shrink the posterior to nothing: the network is right about all of them."""
    x = inputs(60, torch.Generator().manual_seed(9))
    y = posterior.linearised.network.model(x).argmax(-1)
    return lw.tune(posterior, by=by, validation=(x, y), progress=False)


def test_the_scale_of_held_out_data_is_undone(generator: torch.Generator) -> None:
    both = validated(posterior())
    taken = both.history[-1].scale
    assert taken is not None and taken > 1
    torch.testing.assert_close(undo_held_out_scale(both).prior.precisions, both.prior.precisions / taken)
    X, x = inputs(40, generator), inputs(20, generator)
    by_evidence = lw.alarm(posterior().with_prior(both.prior.precisions.item() / taken), X)(x)
    torch.testing.assert_close(lw.alarm(both, X)(x), by_evidence)


def test_scales_of_searches_in_a_row_are_all_undone() -> None:
    twice = validated(validated(posterior(), by="validation"), by="validation")
    torch.testing.assert_close(undo_held_out_scale(twice).prior.precisions, posterior().prior.precisions)


def test_a_prior_set_by_hand_stays() -> None:
    by_hand = validated(posterior()).with_prior(3.0)
    assert undo_held_out_scale(by_hand).prior.precisions.item() == 3.0


def test_scores_can_be_taken_of_a_gaussian_with_its_noise_scaled() -> None:
    fitted = posterior("regression")
    x = inputs(40, torch.Generator().manual_seed(9))
    tuned = lw.tune(fitted, validation=(x, torch.zeros(40, 1, dtype=FLOAT64)), progress=False)
    assert lw.alarm(tuned, x).n == 40


@pytest.mark.parametrize(("shape", "kind"), list(product([(4, 3), (30, 3)], ["classification"])))
def test_outputs_with_many_terms_have_one_p_value_per_datum(shape: tuple[int, ...], kind: str) -> None:
    """The second has more than 64 outputs, which are scored by draws of functions."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, math.prod(shape)), nn.Unflatten(1, shape))
    X, Y = torch.randn(20, 2), torch.randint(3, (20, shape[0]))
    fitted = lw.fit(model, (X, Y), kind, structure="diag", progress=False)
    found = lw.alarm(fitted, (X, Y))(X)
    assert found.shape == (20,) and bool(((found > 0) & (found <= 1)).all())


def test_refusals() -> None:
    with pytest.raises(TypeError, match="expected a Posterior"):
        lw.alarm(nn.Linear(2, 1), torch.randn(5, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="NaN"):
        lw.alarm(posterior(), torch.full((3, 2), math.nan, dtype=FLOAT64))
    with pytest.raises(TypeError, match="held_out: expected"):
        lw.alarm(posterior(), 3)
