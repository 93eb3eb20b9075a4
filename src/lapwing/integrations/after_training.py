"""What the adapters of training loops share: fit and tune on the trainer's loaders, score, write down, find again."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lapwing import metrics
from lapwing.api import words
from lapwing.api.fit import fit
from lapwing.api.tune import tune
from lapwing.errors import InputError, LapwingWarning
from lapwing.network import parameters
from lapwing.planning.budget import parse_memory
from lapwing.posterior import Posterior
from lapwing.predictive import ClassPrediction
from lapwing.runtime.arguments import seeded
from lapwing.storage import load, save
from lapwing.tuning import Budget

FILE = "posterior.lapwing"


@dataclass(frozen=True)
class AfterTraining:
    """What to do with a trained network and its loaders."""

    likelihood: Any
    tuned: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # of lw.fit
    tuning: Mapping[str, Any] = field(default_factory=dict)  # of lw.tune

    def __post_init__(self) -> None:
        """Raise for what is wrong without a network or data: a training may take hours until they are there."""
        _check_names("lw.fit", self.options, fit, given=("model", "data", "likelihood"))
        _check_names("lw.tune", self.tuning, tune, given=("posterior", "data", "validation"))
        if self.likelihood is not None:
            words.likelihood(self.likelihood, (1,))
        words.structure(self.options.get("structure", "auto"))
        words.fisher(self.options.get("fisher", "auto"), seeded(None))
        if words.selector(self.options.get("params", "all")) is None:
            words.layout_choice(self.options.get("params", "all"))
        parse_memory(self.options.get("memory"))
        Budget.parse(self.tuning.get("budget"))

    def check_model(self, model: nn.Module) -> None:
        """Raise for patterns of `params` that name nothing in the model."""
        chosen = words.canonical("params", self.options.get("params", "all"))
        patterns = [chosen] if isinstance(chosen, str) else chosen
        if isinstance(patterns, list | tuple) and not set(patterns) & words.WORDS["params"]:
            parameters.matching(model, patterns)

    def posterior(self, model: nn.Module, train: Any, validation: Any) -> Posterior:
        if train is None:
            raise InputError("The trainer has no training loader, so there is nothing to fit a posterior on.")
        fitted = fit(model, train, self.likelihood, **self.options)
        if self.tuned and validation is None:
            warnings.warn(
                "The trainer has no validation data, so prior and noise are chosen by the evidence of the training "
                "data alone, and there are no scores. Held-out data are the better judge: give the trainer some.",
                LapwingWarning,
                stacklevel=3,
            )
        return tune(fitted, train, validation=validation, **self.tuning) if self.tuned else fitted


def _check_names(function: str, options: Mapping[str, Any], of: Any, given: tuple[str, ...]) -> None:
    known = [name for name in signature(of).parameters if name not in given]
    for name in options:
        if name in given:
            raise InputError(f"Lapwing: {name!r} of {function} is what the trainer provides; leave it out.")
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InputError(f"Lapwing: {function} has no argument {name!r}.{hint} It takes {', '.join(known)}.")


def scores(posterior: Posterior, data: Any, other: Any = None) -> dict[str, float]:
    """NLL, ECE (of classes) and mean epistemic doubt on held-out data; with other data, how well it tells them apart.

    `ood_auroc` is the probability that the doubt about one of the other data exceeds that about a held-out one.
    """
    log_probs, doubts, probs, labels = [], [], [], []
    for x, y in posterior.batches(data, "validation"):
        p = posterior.predict(x)
        log_probs.append(p.log_prob(y).flatten())
        doubts.append(_doubt(p))
        if isinstance(p, ClassPrediction) and isinstance(y, Tensor):
            probs.append(p.log_probs.exp().flatten(0, -2))
            labels.append(y.reshape(-1).long())
    found = {"nll": metrics.nll(torch.cat(log_probs)), "epistemic": float(torch.cat(doubts).mean())}
    if probs:
        kept = (y := torch.cat(labels)) >= 0  # ignored labels are negative
        found["ece"] = metrics.ece(torch.cat(probs)[kept], y[kept])
    if other is not None:
        away = torch.cat([_doubt(posterior.predict(x)) for x, _ in posterior.batches(other, "ood")])
        found["ood_auroc"] = metrics.auroc(torch.cat(doubts), away)
    return found


def _doubt(prediction: Any) -> Tensor:
    """One number per datum."""
    epistemic: Tensor = prediction.epistemic
    return epistemic.detach().reshape(len(epistemic), -1).mean(-1)


def write(posterior: Posterior, folder: str | os.PathLike[str]) -> Path:
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    save(posterior, path)
    return path


def find(folder: str | os.PathLike[str], model: nn.Module) -> Posterior:
    """The posterior of a file, or of a folder of checkpoints."""
    path = Path(folder)
    if path.suffix == ".ckpt":
        raise InputError(
            f"load: {path.name} holds weights. The posterior is beside it: load({str(path.parent)!r}, model)."
        )
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"load: there is no posterior at {path}. It is written beside the checkpoints as {FILE}.")
    return load(path, model)
