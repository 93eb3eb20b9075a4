"""Test NLL of the default estimators on 16 UCI tables beside scikit-learn's own, in the units of the targets.

python examples/long/tables.py --data DIR [--sets yacht,boston] [--splits 5] [--methods lapwing]
python examples/long/tables.py --table      the Markdown of what has been measured, which docs/sklearn.md shows

DIR holds uci_regression.npz and uci_classification.npz. Every figure goes to the record (`--out`) at once, and what is
there is not measured again. Regressors that give no standard deviation get that of their held-out residuals;
classifiers but the Gaussian process get a temperature from held-out rows. Both keep 15 % of the training rows for it.
A Gaussian process gets its kernel from at most 1,000 random rows (500 for classes), the better of two starts, and sees
all; of tables with more than 1,500 rows 500 and 2,000 (classes: 300 and 1,000), as more take hours.
"""

import argparse
import json
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

RECORD = Path(__file__).with_suffix(".json")
REGRESSION = ["yacht", "boston", "energy", "concrete", "wine", "power", "kin8nm", "naval"]
CLASSES = ["australian", "breast_cancer", "ionosphere", "glass", "vehicle", "waveform", "digits", "satellite"]
SPLITS = 5
COLUMNS = {"lapwing": "lapwing", "gp": "Gaussian process", "mlp": "MLP", "boosting": "boosting"}
MANY = 1_500  # rows: above them, a Gaussian process sees a part, and its kernel a smaller one


def gaussian_nll(y, mean, std):
    return -norm.logpdf(y, mean, std).mean()


def some_rows(n, most, seed):
    return np.random.RandomState(seed).permutation(n)[:most]


def best_kernel(process, starts, X, y, seed):
    """Of the highest marginal likelihood that gradient ascent from one of `starts` finds."""
    found = [process(kernel, random_state=seed).fit(X, y) for kernel in starts]
    return max(found, key=lambda model: model.log_marginal_likelihood_value_).kernel_


# --- regression: each gives the test NLL ---------------------------------------------------------------------------


def lapwing_regressor(X, y, X_test, y_test, seed):
    return gaussian_nll(y_test, *LapwingRegressor(random_state=seed).fit(X, y).predict(X_test, return_std=True))


def gp_regressor(X, y, X_test, y_test, seed):
    scale, mean, std = StandardScaler().fit(X), y.mean(), y.std()
    Z, t = scale.transform(X), (y - mean) / std
    few, rows = (some_rows(len(X), most, seed) for most in ((500, 2_000) if len(X) > MANY else (1_000, MANY)))
    starts = [ConstantKernel() * RBF(np.full(X.shape[1], s)) + WhiteKernel() for s in (1, X.shape[1] ** 0.5)]
    kernel = best_kernel(GaussianProcessRegressor, starts, Z[few], t[few], seed)
    process = GaussianProcessRegressor(kernel, optimizer=None).fit(Z[rows], t[rows])
    found, deviation = process.predict(scale.transform(X_test), return_std=True)
    return gaussian_nll(y_test, found * std + mean, deviation * std)


def with_residuals(model, X, y, X_test, y_test, seed):
    X_fit, X_held, y_fit, y_held = train_test_split(X, y, test_size=0.15, random_state=seed)
    model.fit(X_fit, y_fit)
    return gaussian_nll(y_test, model.predict(X_test), np.sqrt(np.mean((y_held - model.predict(X_held)) ** 2)))


def mlp_regressor(X, y, X_test, y_test, seed):
    scale, mean, std = StandardScaler().fit(X), y.mean(), y.std()
    network = MLPRegressor(hidden_layer_sizes=(50, 50), early_stopping=True, max_iter=1000, random_state=seed)
    inside = (scale.transform(X), (y - mean) / std, scale.transform(X_test), (y_test - mean) / std)
    return with_residuals(network, *inside, seed) + np.log(std)


def boosting_regressor(X, y, X_test, y_test, seed):
    return with_residuals(HistGradientBoostingRegressor(random_state=seed), X, y, X_test, y_test, seed)


# --- classes -------------------------------------------------------------------------------------------------------


def class_nll(log_p, y):
    return -np.maximum(log_p, -30)[np.arange(len(y)), y].mean()


def lapwing_classifier(X, y, X_test, y_test, seed):
    return class_nll(LapwingClassifier(random_state=seed).fit(X, y).predict_log_proba(X_test), y_test)


def log_lik(p, y):
    found = np.log(np.maximum(np.where(y, p, 1 - p), 1e-12)).mean()
    return found if np.isfinite(found) else -np.inf


def gp_classifier(X, y, X_test, y_test, seed):
    """One process a class, as scikit-learn has it."""
    scale = StandardScaler().fit(X)
    Z, Z_test = scale.transform(X), scale.transform(X_test)
    few, rows = (some_rows(len(X), most, seed) for most in ((300, 1_000) if len(X) > MANY else (500, MANY)))
    classes, scores = range(y.max() + 1), []
    for c in classes[1:] if len(classes) == 2 else classes:
        starts = [ConstantKernel() * RBF(s) for s in (1, X.shape[1] ** 0.5)]
        kernel = best_kernel(GaussianProcessClassifier, starts, Z[few], y[few] == c, seed)
        both = [GaussianProcessClassifier(kernel, optimizer=None).fit(Z[some], y[some] == c) for some in (rows, few)]
        # With all rows its Newton steps may diverge, which the probabilities of the training rows show.
        process = max(both, key=lambda model: log_lik(model.predict_proba(Z)[:, 1], y == c))
        scores.append(process.predict_proba(Z_test)[:, 1])
    p = np.stack([1 - scores[0], scores[0]] if len(classes) == 2 else scores, 1)
    return class_nll(np.log(np.maximum(p / p.sum(1, keepdims=True), 1e-12)), y_test)


def with_temperature(model, X, y, X_test, y_test, seed):
    X_fit, X_held, y_fit, y_held = train_test_split(X, y, test_size=0.15, random_state=seed, stratify=y)
    model.fit(X_fit, y_fit)
    held, test = (np.log(np.maximum(model.predict_proba(v), 1e-12)) for v in (X_held, X_test))

    def scaled(log_p, t):
        return log_p / t - logsumexp(log_p / t, axis=1, keepdims=True)

    best = minimize_scalar(lambda u: class_nll(scaled(held, np.exp(u)), y_held), bounds=(-3, 3), method="bounded").x
    return class_nll(scaled(test, np.exp(best)), y_test)


def mlp_classifier(X, y, X_test, y_test, seed):
    scale = StandardScaler().fit(X)
    network = MLPClassifier(hidden_layer_sizes=(50, 50), early_stopping=True, max_iter=1000, random_state=seed)
    return with_temperature(network, scale.transform(X), y, scale.transform(X_test), y_test, seed)


def boosting_classifier(X, y, X_test, y_test, seed):
    return with_temperature(HistGradientBoostingClassifier(random_state=seed), X, y, X_test, y_test, seed)


REGRESSORS = {"lapwing": lapwing_regressor, "gp": gp_regressor, "mlp": mlp_regressor, "boosting": boosting_regressor}
CLASSIFIERS = {
    "lapwing": lapwing_classifier, "gp": gp_classifier, "mlp": mlp_classifier, "boosting": boosting_classifier
}  # fmt: skip

# --- the record and the table --------------------------------------------------------------------------------------


def split(data, name, k):
    """Training and test rows; the validation rows of the classification sets are trained on too."""
    X, y = data[f"{name}_x"].astype(float), data[f"{name}_y"]
    if name in REGRESSION:
        train, test = data[f"{name}_std_train_idx"][k], data[f"{name}_std_test_idx"][k]
        return X[train], y[train].astype(float), X[test], y[test].astype(float)
    train = np.concatenate([data[f"{name}_train_idx"][k], data[f"{name}_valid_idx"][k]])
    test = data[f"{name}_test_idx"][k]
    return X[train], y[train].astype(int), X[test], y[test].astype(int)


def measure(record, name, methods, splits, directory):
    data = np.load(directory / f"uci_{'regression' if name in REGRESSION else 'classification'}.npz")
    for k in range(splits):
        rows = split(data, name, k)
        for method in methods:
            key = f"{name}/{method}/{k}"
            if key not in record:
                record[key] = round(float((REGRESSORS if name in REGRESSION else CLASSIFIERS)[method](*rows, k)), 4)
                yield key


def shown(values, best):
    mean = f"{np.mean(values):.3f}"
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return (f"**{mean}**" if best else mean) + error


def table(record):
    """Means over the splits, in Markdown; the best of a row in bold. Then on how many sets we are at least as good."""
    for title, sets in (("regression", REGRESSION), ("classes", CLASSES)):
        yield f"| {title} | " + " | ".join(COLUMNS.values()) + " |\n|" + " --- |" * (1 + len(COLUMNS))
        won = dict.fromkeys(list(COLUMNS)[1:], 0)
        for name in sets:
            found = [[v for key, v in record.items() if key.startswith(f"{name}/{method}/")] for method in COLUMNS]
            n = min(map(len, found))  # splits that all of them have
            if n == 0:
                continue
            found = [values[:n] for values in found]
            means = [round(float(np.mean(v)), 3) for v in found]
            cells = [shown(values, mean == min(means)) for values, mean in zip(found, means)]
            yield (
                f"| {name.replace('_', ' ')}{'' if n >= SPLITS else f' ({n} of {SPLITS} splits)'} | "
                + " | ".join(cells)
                + " |"
            )
            for method, mean in zip(won, means[1:]):
                won[method] += means[0] <= mean
        yield "| at least as good | | " + " | ".join(f"on {n} of {len(sets)}" for n in won.values()) + " |\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sets", default=",".join(REGRESSION + CLASSES))
    parser.add_argument("--methods", default=",".join(COLUMNS))
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    record = json.loads(chosen.out.read_text("utf-8")) if chosen.out.exists() else {}
    if chosen.data is not None:
        for name in chosen.sets.split(","):
            for key in measure(record, name, chosen.methods.split(","), chosen.splits, chosen.data):
                print(f"{key:24s}{record[key]:8.3f}", flush=True)
                chosen.out.write_text(json.dumps(record, indent=0, sort_keys=True), encoding="utf-8")
    if chosen.table or chosen.data is not None:
        print("\n".join(table(record)))


if __name__ == "__main__":
    main()
