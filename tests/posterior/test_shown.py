"""What a session at a prompt shows: short representations, public names, and how a posterior is kept."""

# ruff: noqa: E501 (a table reads by rows)
from __future__ import annotations

import copy
import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw

X = torch.linspace(-1, 1, 24).reshape(12, 2)
LABELS, REAL = torch.arange(12) % 3, torch.linspace(-1, 2, 12)[:, None]


def made(n_outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, n_outputs))


def classifier(**options: Any) -> lw.Posterior:
    return lw.fit(made(), (X, LABELS), "classification", **options)


def regressor(likelihood: Any = "regression") -> lw.Posterior:
    return lw.fit(made(1), (X, REAL), likelihood)


def custom() -> lw.Posterior:
    return lw.fit(made(1), (X, REAL), lw.CustomLikelihood(lambda f, y: -(f - y).square().sum()))


SHOWN: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("a fitted posterior", lambda: classifier(structure="kron"), ("Sequential", "27 parameters", "Kron", "Categorical", "12 data", "prior precision 1", "not tuned: lw.tune")),
    ("a tuned one", lambda: lw.tune(regressor()), ("17 parameters", "Gaussian", "noise std", "prior precision", ", tuned")),
    ("one of many groups", lambda: lw.tune(classifier(), groups="layer"), (" to ", "in 2 groups", "tuned")),
    ("one with a prior", lambda: classifier(prior=3.0), ("prior precision 3", "as given")),
    ("a refined one", lambda: lw.refine(classifier()), ('refined by "laplace"',)),
    ("one of no weights", lambda: classifier(params=lw.Subnetwork(k=0)), ("0 parameters",)),
    ("class probabilities", lambda: classifier().predict(X), ("ClassPrediction", "probs (12, 3)", "entropy", "nats", "epistemic")),
    ("real numbers", lambda: regressor().predict(X), ("RegressionPrediction", "(12, 1)", "std", "%")),
    ("a density", lambda: custom().predict(X), ("DensityPrediction", "log_prob(y)")),
    ("outputs", lambda: classifier().outputs(X), ("mean and var (12, 3)", "cov (12, 3, 3)")),
    ("functions", lambda: classifier().functions(4), ("4 functions", "(4, B, 3)")),
]  # fmt: skip


@pytest.mark.parametrize(("make", "words"), [row[1:] for row in SHOWN], ids=[row[0] for row in SHOWN])
def test_a_representation_is_short_and_says_it(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    shown = repr(make())
    assert len(shown.splitlines()) <= 3 and max(map(len, shown.splitlines())) <= 120
    assert [word for word in words if word not in shown] == [], shown


@pytest.mark.parametrize(
    "make",
    [
        lambda: classifier().diagnose(),
        lambda: lw.plan(made(), (X, LABELS), "classification"),
        lambda: lw.compare([classifier(), classifier(prior=2.0)]),
    ],
    ids=["diagnosis", "plan", "comparison"],
)
def test_a_table_is_shown_at_the_prompt_as_it_is_printed(make: Callable[[], Any]) -> None:
    table = make()
    assert repr(table) == str(table) and "Finding(" not in repr(table) and "Line(" not in repr(table)


# --- names --------------------------------------------------------------------------------------------------


def test_dir_is_the_public_api() -> None:
    assert {name for name in dir(lw) if not name.startswith("__")} == set(lw.__all__)
    assert "__version__" in dir(lw) and list(lw.__all__) == sorted(set(lw.__all__), key=list(lw.__all__).index)
    assert all(hasattr(lw, name) for name in lw.__all__)


def test_sub_modules_are_reached_all_the_same() -> None:
    assert importlib.import_module("lapwing.network.layers") is lw.network.layers


def test_tab_completion_offers_what_users_call() -> None:
    posterior = classifier()
    offered = {name for name in dir(posterior) if not name.startswith("_")}
    assert {
        "predict",
        "outputs",
        "sample",
        "log_evidence",
        "diagnose",
        "with_prior",
        "save",
        "mean",
        "layout",
    } <= offered
    assert offered.isdisjoint({"linearised", "chunk_floats", "check_unrefined", "predicted", "untuned"})
    assert all(hasattr(type(posterior), name) or hasattr(posterior, name) for name in offered)


# --- keeping ------------------------------------------------------------------------------------------------


def test_save_is_a_method_too(tmp_path: Path) -> None:
    posterior = classifier()
    lw.save(posterior, tmp_path / "a")
    posterior.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("write", [pickle.dumps, lambda p: torch.save(p, io.BytesIO())], ids=["pickle", "torch.save"])
def test_pickling_is_refused_in_words(write: Callable[[Any], Any]) -> None:
    with pytest.raises(lw.InputTypeError, match=r"not pickled.*lw\.save\(posterior, path\).*lw\.load\(path, model\)"):
        write(classifier())


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_a_copy_is_the_posterior_itself(again: Callable[[Any], Any]) -> None:
    posterior = classifier()
    assert again(posterior) is posterior and again({"p": posterior})["p"] is posterior
