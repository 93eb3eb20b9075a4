"""The scikit-learn estimators: scikit-learn's own checks, and what a user of tables does with them."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_iris, make_regression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from skorch import NeuralNetRegressor
from torch import nn

import lapwing as lw
from lapwing.sklearn import LapwingClassifier, LapwingRegressor

QUICK = {"epochs": 80, "hidden": (20,), "random_state": 0}
CHECKED = [LapwingRegressor(epochs=80), LapwingClassifier(epochs=80)]


@parametrize_with_checks(CHECKED)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def wave(n: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(seed)
    X = random.uniform(-3, 3, (n, 2))
    return X, 100 + 10 * np.sin(X[:, 0]) + X[:, 1] + random.randn(n)


def test_error_bars_are_in_the_targets_units_and_grow_away_from_the_data():
    X, y = wave(300)
    model = LapwingRegressor(random_state=0, epochs=300, tuning="evidence").fit(X[:200], y[:200])
    mean, std = model.predict(X[200:], return_std=True)
    assert model.score(X[200:], y[200:]) > 0.9
    assert 0.7 < np.mean(((y[200:] - mean) / std) ** 2) < 1.6  # the noise has a standard deviation of 1
    low, high = model.predict_interval(X[200:], 0.9)
    assert 0.8 <= np.mean((low <= y[200:]) & (y[200:] <= high)) <= 0.98
    far = model.predict(np.array([[20.0, 20.0]]), return_std=True)[1]
    assert far[0] > 3 * std.mean()


def test_predictions_are_those_of_the_posterior_scaled_back():
    X, y = wave()
    model = LapwingRegressor(**QUICK).fit(X, y)
    x = torch.as_tensor((X - model.scale_.mean) / model.scale_.std)
    p = model.posterior_.predict(x)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, p.mean.numpy()[:, 0] * model.target_scale_.std + model.target_scale_.mean)
    np.testing.assert_allclose(std, p.std.numpy()[:, 0] * model.target_scale_.std)


def test_a_weight_is_a_repetition():
    X, y = wave(40)
    weight = np.arange(40) % 4
    a = LapwingRegressor(**QUICK).fit(X, y, sample_weight=weight)
    order = np.random.RandomState(1).permutation(int(weight.sum()))
    b = LapwingRegressor(**QUICK).fit(np.repeat(X, weight, 0)[order], np.repeat(y, weight)[order])
    for one, other in zip(a.predict(X, return_std=True), b.predict(X, return_std=True), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_fractions_count_relative_to_each_other():
    X, y = wave(60)
    y[:30] += 50
    a = LapwingRegressor(**QUICK).fit(X, y, sample_weight=np.r_[np.full(30, 1e-6), np.full(30, 0.7)])
    assert np.mean(a.predict(X) - y[30:].mean()) < 10


def test_several_outputs_have_their_own_noise():
    X, y = wave(200)
    Y = np.stack([y, 1000 * y + 20_000 * np.random.RandomState(0).randn(200)], 1)
    mean, std = LapwingRegressor(**QUICK).fit(X, Y).predict(X, return_std=True)
    assert mean.shape == std.shape == (200, 2)
    assert 5_000 < std[:, 1].mean() - std[:, 0].mean() < 60_000


def test_string_labels_and_data_frames():
    data = load_iris(as_frame=True)
    names = data.target_names[data.target]
    model = LapwingClassifier(**QUICK).fit(data.data, names)
    assert set(model.predict(data.data)) <= set(names)
    assert model.score(data.data, names) > 0.9
    assert list(model.feature_names_in_) == list(data.data.columns)
    p = model.predict_proba(data.data)
    np.testing.assert_allclose(p.sum(1), 1)
    np.testing.assert_allclose(np.exp(model.decision_function(data.data)), p, rtol=1e-6)
    assert bool((model.epistemic(data.data) >= 0).all())
    with pytest.warns(UserWarning, match="feature names"):
        model.predict(data.data.to_numpy())


def test_two_classes_give_log_odds_and_classes_can_be_balanced():
    random = np.random.RandomState(0)
    X, y = random.randn(300, 2), (random.rand(300) < 0.1).astype(int)
    plain = LapwingClassifier(**QUICK).fit(X, y)
    balanced = LapwingClassifier(class_weight="balanced", **QUICK).fit(X, y)
    assert plain.decision_function(X).shape == (300,)
    assert plain.predict_proba(X)[:, 1].mean() < 0.2 < balanced.predict_proba(X)[:, 1].mean()


@pytest.mark.slow  # starts processes
def test_pipelines_searches_folds_and_calibration():
    X, y = load_diabetes(return_X_y=True)
    scores = cross_val_score(
        make_pipeline(StandardScaler(), LapwingRegressor(**QUICK)), X[:150], y[:150], cv=3, n_jobs=2
    )
    assert scores.shape == (3,) and np.isfinite(scores).all()
    search = GridSearchCV(LapwingRegressor(**QUICK), {"hidden": [(5,), (10,)]}, cv=2).fit(X[:100], y[:100])
    assert search.best_params_["hidden"] in [(5,), (10,)]
    X, y = load_iris(return_X_y=True)
    calibrated = CalibratedClassifierCV(LapwingClassifier(**QUICK), cv=2).fit(X, y)
    assert calibrated.score(X, y) > 0.8


def test_pickles_predict_the_same_to_the_bit():
    X, y = wave()
    model = LapwingRegressor(**QUICK).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    for a, b in zip(model.predict(X, return_std=True), again.predict(X, return_std=True), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not hasattr(clone(model), "posterior_")


class Narrow(nn.Sequential):
    def __init__(self, n_features: int = 2, n_outputs: int = 1) -> None:
        super().__init__(nn.Linear(n_features, 7), nn.Tanh(), nn.Linear(7, n_outputs))


def of_sizes(n_features, n_outputs):
    return Narrow(n_features, n_outputs)


def of_nothing():
    return Narrow()


@pytest.mark.parametrize("module", [Narrow, Narrow(), of_sizes, of_nothing, NeuralNetRegressor(Narrow)])
def test_modules_of_the_users_own(module):
    X, y = wave()
    model = LapwingRegressor(module, **{**QUICK, "hidden": (3,)}).fit(X, y)
    assert model.posterior_.layout.p == 2 * 7 + 7 + 7 + 1
    assert np.isfinite(model.predict(X, return_std=True)[1]).all()


def test_a_module_given_is_copied_and_without_epochs_keeps_its_weights():
    X, y = wave()
    module = Narrow()
    before = [p.detach().clone() for p in module.parameters()]
    model = LapwingRegressor(module, epochs=0).fit(X, y)
    for old, now, used in zip(before, module.parameters(), model.module_.parameters(), strict=True):
        assert torch.equal(old, now) and torch.equal(old.to(used), used)


def test_global_random_states_stay_as_they_were():
    X, y = wave(40)
    before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    LapwingRegressor(**QUICK).fit(X, y).predict(X)
    assert torch.equal(before, torch.get_rng_state()) and (numpys == np.random.get_state()[1]).all()


def test_bad_input_is_refused_in_words():
    X, y = wave(20)
    with pytest.raises(ValueError, match="one class"):
        LapwingClassifier().fit(X, np.ones(20))
    with pytest.raises(lw.InputTypeError, match="skorch net"):
        LapwingRegressor(3).fit(X, y)
    with pytest.raises(lw.InputTypeError, match="gave int"):
        LapwingRegressor(lambda d, c: 3).fit(X, y)
    with pytest.raises(lw.InputError, match="held_out"):
        LapwingRegressor(tuning="by hand").fit(X, y)
    with pytest.raises(ValueError, match="NaN"):
        LapwingRegressor().fit(pd.DataFrame({"a": [1.0, np.nan, 2.0]}), [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="Negative values"):
        LapwingRegressor().fit(X, y, sample_weight=-np.ones(20))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"epochs": -1}, "epochs: expected a whole number from 0"),
        ({"batch_size": 0}, "batch_size: expected a whole number from 1"),
        ({"learning_rate": 0}, "learning_rate: expected a number above 0"),
        ({"validation_fraction": 2.0}, "below 1"),
        ({"hidden": 20}, r"such as \(50, 50\)"),
        ({"hidden": (0,)}, r"such as \(50, 50\)"),
        ({"device": "gpu"}, "'cpu' or 'cuda'"),
    ],
)
def test_settings_are_checked_before_training(setting, message):
    X, y = wave(20)
    with pytest.raises(lw.InputError, match=message):
        LapwingRegressor(**setting).fit(X, y)


def test_modules_that_do_not_fit_the_table_are_refused():
    X, y = wave(40)
    for wrong in (nn.Linear(5, 1), nn.Flatten()):
        with pytest.raises(lw.InputError, match=r"rows of 2 features|no parameter"):
            LapwingRegressor(wrong, **QUICK).fit(X, y)
    for wrong in (nn.Linear(2, 4), nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))):
        with pytest.raises(lw.ShapeError, match=r"\(1, 1\)"):
            LapwingRegressor(wrong, **QUICK).fit(X, y)
    for n in (1, 5):  # five would give classes that no label has
        with pytest.raises(lw.ShapeError, match=r"\(1, 2\)"):
            LapwingClassifier(nn.Linear(2, n), **QUICK).fit(X, y > 100)


def test_constant_columns_and_targets():
    X, y = make_regression(30, 3, random_state=0)
    X[:, 1] = 4.0
    assert np.isfinite(LapwingRegressor(**QUICK).fit(X, y).predict(X, return_std=True)[1]).all()
    mean, std = LapwingRegressor(**QUICK).fit(X, np.full(30, 7.0)).predict(X, return_std=True)
    np.testing.assert_allclose(mean, 7.0, atol=0.3)
    assert np.isfinite(std).all()
