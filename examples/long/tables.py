"""Test NLL of the default estimators on UCI tables beside scikit-learn's own, in the units of the targets.

python examples/long/tables.py --data DIR [--sets yacht,boston] [--splits 5]      DIR holds uci_regression.npz and
uci_classification.npz. Regressors that give no standard deviation get that of their held-out residuals; classifiers but
the Gaussian process get a temperature from held-out rows. Both keep 15 % of the training rows for it.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

from lapwing.sklearn import LapwingClassifier, LapwingRegressor

REGRESSION = ["yacht", "boston", "energy", "concrete", "wine", "power", "kin8nm", "naval"]
CLASSES = ["australian", "breast_cancer", "ionosphere", "glass", "vehicle", "waveform", "digits", "satellite"]
MOST_FOR_A_GP = 2_000  # training rows: more take memory and hours


def gaussian_nll(y, mean, std):
    return -norm.logpdf(y, mean, std).mean()


def with_residuals(model, X, y, X_test, y_test, seed):
    X_fit, X_held, y_fit, y_held = train_test_split(X, y, test_size=0.15, random_state=seed)
    model.fit(X_fit, y_fit)
    return gaussian_nll(y_test, model.predict(X_test), np.sqrt(np.mean((y_held - model.predict(X_held)) ** 2)))


def regression(X, y, X_test, y_test, seed):
    scale, target = StandardScaler().fit(X), StandardScaler().fit(y[:, None])
    Z, Z_test, t = scale.transform(X), scale.transform(X_test), target.transform(y[:, None])[:, 0]
    shift = np.log(target.scale_[0])  # from standardised targets to the user's units
    t_test = target.transform(y_test[:, None])[:, 0]
    own = LapwingRegressor(random_state=seed).fit(X, y)
    yield "lapwing", gaussian_nll(y_test, *own.predict(X_test, return_std=True))
    if len(X) <= MOST_FOR_A_GP:
        kernel = ConstantKernel() * RBF(np.ones(X.shape[1])) + WhiteKernel()
        process = GaussianProcessRegressor(kernel, random_state=seed).fit(Z, t)
        yield "gp", gaussian_nll(t_test, *process.predict(Z_test, return_std=True)) + shift
    network = MLPRegressor(hidden_layer_sizes=(50, 50), early_stopping=True, max_iter=1000, random_state=seed)
    yield "mlp", with_residuals(network, Z, t, Z_test, t_test, seed) + shift
    yield "boosting", with_residuals(HistGradientBoostingRegressor(random_state=seed), X, y, X_test, y_test, seed)


def class_nll(log_p, y):
    return -np.maximum(log_p, -30)[np.arange(len(y)), y].mean()


def with_temperature(model, X, y, X_test, y_test, seed):
    X_fit, X_held, y_fit, y_held = train_test_split(X, y, test_size=0.15, random_state=seed, stratify=y)
    model.fit(X_fit, y_fit)
    held, test = (np.log(np.maximum(model.predict_proba(v), 1e-12)) for v in (X_held, X_test))

    def scaled(log_p, t):
        return log_p / t - logsumexp(log_p / t, axis=1, keepdims=True)

    best = minimize_scalar(lambda u: class_nll(scaled(held, np.exp(u)), y_held), bounds=(-3, 3), method="bounded").x
    return class_nll(scaled(test, np.exp(best)), y_test)


def classes(X, y, X_test, y_test, seed):
    scale = StandardScaler().fit(X)
    Z, Z_test = scale.transform(X), scale.transform(X_test)
    own = LapwingClassifier(random_state=seed).fit(X, y)
    yield "lapwing", class_nll(own.predict_log_proba(X_test), y_test)
    if len(X) <= MOST_FOR_A_GP:
        process = GaussianProcessClassifier(ConstantKernel() * RBF(), random_state=seed).fit(Z, y)
        yield "gp", class_nll(np.log(process.predict_proba(Z_test)), y_test)
    network = MLPClassifier(hidden_layer_sizes=(50, 50), early_stopping=True, max_iter=1000, random_state=seed)
    yield "mlp", with_temperature(network, Z, y, Z_test, y_test, seed)
    yield "boosting", with_temperature(HistGradientBoostingClassifier(random_state=seed), X, y, X_test, y_test, seed)


def split(data, name, k):
    """Training and test rows; the validation rows of the classification sets are trained on too."""
    X, y = data[f"{name}_x"].astype(float), data[f"{name}_y"]
    if name in REGRESSION:
        train, test = data[f"{name}_std_train_idx"][k], data[f"{name}_std_test_idx"][k]
        return X[train], y[train].astype(float), X[test], y[test].astype(float)
    train = np.concatenate([data[f"{name}_train_idx"][k], data[f"{name}_valid_idx"][k]])
    test = data[f"{name}_test_idx"][k]
    return X[train], y[train].astype(int), X[test], y[test].astype(int)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(REGRESSION + CLASSES))
    parser.add_argument("--splits", type=int, default=5)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in chosen.sets.split(","):
        kind = "regression" if name in REGRESSION else "classification"
        data = np.load(chosen.data / f"uci_{kind}.npz")
        found = {}
        for k in range(chosen.splits):
            for method, nll in (regression if name in REGRESSION else classes)(*split(data, name, k), k):
                found.setdefault(method, []).append(nll)
        print(f"{name:14s}" + "  ".join(f"{m} {np.mean(v):.3f}±{np.std(v):.3f}" for m, v in found.items()), flush=True)


if __name__ == "__main__":
    main()
