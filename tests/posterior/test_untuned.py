"""The first prediction of a posterior that nobody tuned says so, once; nothing else does."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw

X = torch.linspace(-1, 1, 24).reshape(12, 2)
LABELS, REAL = torch.arange(12) % 3, torch.linspace(-1, 2, 12)[:, None]
WORDS = "has not been tuned"


def made(n_outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, n_outputs))


def classifier(model: nn.Module, **options: Any) -> lw.Posterior:
    return lw.fit(model, (X, LABELS), "classification", **options)


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if issubclass(w.category, lw.LapwingWarning)]


def test_the_first_prediction_says_what_why_and_what_to_do() -> None:
    posterior = classifier(made())
    (first,) = warned(lambda: posterior.predict(X))
    for words in (WORDS, "prior precision 1 is a placeholder", "lw.tune(posterior, train_loader)", "with_prior"):
        assert words in str(first.message)
    assert first.filename == __file__  # the user's own line
    assert issubclass(first.category, UserWarning)
    assert not warned(lambda: posterior.predict(X))


def test_a_noise_that_was_left_open_is_named_too() -> None:
    (first,) = warned(lambda: lw.fit(made(1), (X, REAL), "regression").predict(X))
    assert "prior precision 1 and its noise" in str(first.message) and "are placeholders" in str(first.message)


QUIET: dict[str, Callable[[nn.Module], lw.Posterior]] = {
    "tuned": lambda m: lw.tune(classifier(m)),
    "tuned classically": lambda m: lw.tune(classifier(m), by="fixed_point", mode="network"),
    "tuned on held-out data": lambda m: lw.tune(classifier(m), by="validation", validation=(X, LABELS)),
    "with a prior": lambda m: classifier(m).with_prior(1.0),
    "fitted with a precision": lambda m: classifier(m, prior=2.0),
    "fitted with the default, as a choice": lambda m: classifier(m, prior=1.0),
    "fitted with a prior": lambda m: classifier(m, prior=lw.prior(m)),
    "a Gaussian process": lambda m: classifier(m, structure="gp"),
    "refined after tuning": lambda m: lw.refine(lw.tune(classifier(m))),
}


@pytest.mark.parametrize("make", QUIET.values(), ids=QUIET)
def test_a_choice_is_taken_without_a_word(make: Callable[[nn.Module], lw.Posterior]) -> None:
    posterior = make(made())
    assert not warned(lambda: posterior.predict(X))


def test_a_noise_of_the_users_is_a_choice() -> None:
    assert not warned(lambda: lw.fit(made(1), (X, REAL), lw.Gaussian(noise_std=0.5)).predict(X))


LOUD: dict[str, Callable[[lw.Posterior], lw.Posterior]] = {
    "updated": lambda p: p.updated((X, LABELS)),
    "merged": lambda p: lw.merge([p, p]),
    "refined": lw.refine,
}


@pytest.mark.parametrize("make", LOUD.values(), ids=LOUD)
def test_what_is_made_of_placeholders_is_a_placeholder(make: Callable[[lw.Posterior], lw.Posterior]) -> None:
    posterior = make(classifier(made()))
    assert len(warned(lambda: posterior.predict(X))) == 1


def test_the_librarys_own_predictions_say_nothing() -> None:
    posterior = classifier(made())

    def work() -> None:
        posterior.diagnose()
        lw.tune(posterior, validation=(X, LABELS)).diagnose()
        lw.conformal(posterior, (X, LABELS), level=0.5).predict(X)
        lw.alarm(posterior, (X, LABELS))(X)
        posterior.outputs(X).var  # noqa: B018

    assert not [w for w in warned(work) if WORDS in str(w.message)]


def test_many_threads_hear_it_once() -> None:
    posterior, start = classifier(made()), threading.Barrier(8)

    def ask() -> None:
        start.wait()
        posterior.predict(X)

    def all_ask() -> None:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(warned(all_ask)) == 1


@pytest.mark.parametrize(("make", "times"), [(classifier, 1), (QUIET["tuned"], 0)], ids=["untuned", "tuned"])
def test_a_file_keeps_whether_it_was_tuned(make: Any, times: int, tmp_path: Path) -> None:
    model = made()
    make(model).save(tmp_path / "net.lapwing")
    loaded = lw.load(tmp_path / "net.lapwing", model)
    assert len(warned(lambda: loaded.predict(X))) == times
