"""Thin loops around the objectives: a model trained in place, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lapwing.api.fit import fit
from lapwing.errors import InputError
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Posterior, Run
from lapwing.runtime import distributed
from lapwing.runtime.sandbox import plain_tensors
from lapwing.train.loop import Loop
from lapwing.train.mean_field import MeanField
from lapwing.train.objective import Objective
from lapwing.train.penalised import PenalisedLikelihood
from lapwing.train.preparation import bound_to, picked, prepared
from lapwing.train.settings import Settings
from lapwing.train.variational_laplace import VariationalLaplace


def variational_laplace(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int,
    optimizer: Any = None,
    schedule: Any = None,
    schedule_every: str = "epoch",
    lr: float = 1e-3,
    beta: float = 1.0,
    multiplier: float = 10,
    prior: Any = "fan_in",
    fisher: str = "sampled",
    draws: int = 1,
    params: Any = "all",
    allow_piecewise: bool = False,
    batch_size: int = 128,
    n_data: int | None = None,
    clip: float | None = None,
    validation: Any = None,
    patience: int | None = None,
    callback: Callable[..., Any] | None = None,
    checkpoint: Any = None,
    every: float = 60,
    inputs: Any = None,
    targets: Any = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Run:
    """Train a model in place by Variational Laplace; `run.posterior` is N(μ, diag σ²) with its bound on log p(D).

    `optimizer`: a function of parameter groups (Adam at `lr`, unless given), whose second group are the logarithms of
    the standard deviations, at `multiplier` times the learning rate. `schedule`: a function of the optimizer; it is
    stepped after every epoch, or `schedule_every="step"`. Arrays and data sets are shuffled, `batch_size` rows at a
    time; a loader decides itself.
    `n_data`: how many data an epoch has, counted unless given.

    `validation`: held-out data, measured after every epoch in `run.history`. `patience`: stop after so many epochs
    without a better held-out NLL, and return to the best; off by default, since variances are still on their way when
    the means are done. `callback` is called with the record of every epoch.

    `checkpoint` names a directory where progress is written every so many seconds; a run that was killed goes on from
    there to the same bits. Under torch.distributed every rank has its shard of the data. `generator` decides the order
    of the data, the labels drawn and whatever the model draws; the global random state is as it was afterwards.
    """
    if fisher == "hessian":
        raise InputError(
            'fisher="hessian" cannot be trained with: its variances grow without bound. Use "sampled", the default; '
            'look at it with lw.train.VariationalLaplace(..., fisher="hessian") under torch.no_grad().'
        )
    settings = Settings(**picked(locals()))
    make = partial(VariationalLaplace, fisher=fisher, draws=draws, allow_piecewise=allow_piecewise)
    return _variational("train.variational_laplace", make, settings, locals(), {"fisher": fisher, "draws": draws})


def mean_field(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int,
    optimizer: Any = None,
    schedule: Any = None,
    schedule_every: str = "epoch",
    lr: float = 1e-3,
    beta: float = 1.0,
    multiplier: float = 10,
    prior: Any = "fan_in",
    estimator: str = "reparam",
    draws: int = 1,
    params: Any = "all",
    batch_size: int = 128,
    n_data: int | None = None,
    clip: float | None = None,
    validation: Any = None,
    patience: int | None = None,
    callback: Callable[..., Any] | None = None,
    checkpoint: Any = None,
    every: float = 60,
    inputs: Any = None,
    targets: Any = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Run:
    """Train a model in place by mean-field variational inference; the arguments are those of `variational_laplace`.

    `estimator`: "reparam" or "local". `run.posterior` predicts with 10 draws of the weights unless told otherwise.
    """
    settings = Settings(**picked(locals()))
    make = partial(MeanField, estimator=estimator, draws=draws)
    return _variational("train.mean_field", make, settings, locals(), {"estimator": estimator, "draws": draws})


def map(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int,
    optimizer: Any = None,
    schedule: Any = None,
    schedule_every: str = "epoch",
    lr: float = 1e-3,
    beta: float = 1.0,
    multiplier: float = 10,
    prior: Any = "fan_in",
    structure: Any = "auto",
    params: Any = "all",
    batch_size: int = 128,
    n_data: int | None = None,
    clip: float | None = None,
    validation: Any = None,
    patience: int | None = None,
    callback: Callable[..., Any] | None = None,
    checkpoint: Any = None,
    every: float = 60,
    inputs: Any = None,
    targets: Any = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Run:
    """Train a model in place to its maximum a posteriori: weight decay βδ/N around the prior's mean.

    The arguments are those of `variational_laplace`; `multiplier` is that of a noise that is learned.
    `run.posterior` is the Laplace posterior of `lw.fit` there, in this `structure`, under the same prior: one pass over
    the data when it is first asked for.
    """
    settings = Settings(**picked(locals()))
    given = locals()
    with distributed.collective_call("train.map"), plain_tensors(), torch.enable_grad():
        loss, stream, draws = prepared("train.map", PenalisedLikelihood, given)
        history = Loop(loss, stream, settings, "map", bound_to("map", loss, {}), draws).run()
    assert isinstance(loss, PenalisedLikelihood)
    versions = [t._version for t in model.state_dict().values()]

    def made() -> Posterior:
        if [t._version for t in model.state_dict().values()] != versions:
            raise InputError(
                "run.posterior is fitted when it is first asked for, and the model's weights have changed since the "
                "run. Ask for it before training on, or fit anew: lw.fit(model, data, likelihood)."
            )
        return fit(
            model,
            stream.batches,
            loss.settled(),
            structure=structure,
            params=list(loss.layout.names),
            prior=loss.prior,
            likelihood_scale=1 / loss.beta,
            progress=progress,
            generator=generator,
        )

    return Run(model, history, made)


def _variational(
    what: str, make: Callable[..., Objective], settings: Settings, given: dict[str, Any], facts: dict[str, Any]
) -> Run:
    with distributed.collective_call(what), plain_tensors(), torch.enable_grad():
        loss, stream, draws = prepared(what, make, given)
        settings.warn_of_short_way(len(stream))
        word = what.removeprefix("train.")
        history = Loop(loss, stream, settings, word, bound_to(word, loss, facts), draws).run()
        assert isinstance(loss, Objective)
        posterior = loss.posterior(stream.batches)
    return Run(given["model"], history, lambda: posterior)
