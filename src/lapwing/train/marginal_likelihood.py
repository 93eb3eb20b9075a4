"""Marginal-likelihood training: weights by gradient steps, prior precisions and noise by the evidence along the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler

from lapwing.api import words
from lapwing.api.fit import fit
from lapwing.errors import InputError, warn
from lapwing.likelihoods import Likelihood
from lapwing.network.module import unwrapped
from lapwing.posterior import Posterior, Run
from lapwing.priors import GaussianPrior
from lapwing.runtime import distributed
from lapwing.runtime.arguments import choose, counted, positive_scale
from lapwing.runtime.sandbox import plain_tensors, random_state_kept
from lapwing.train.evidence_ascent import Ascent, EvidenceAscent
from lapwing.train.loop import Loop
from lapwing.train.penalised import PenalisedLikelihood
from lapwing.train.preparation import bound_to, picked, prepared
from lapwing.train.settings import Settings


def marglik(
    model: nn.Module,
    data: Any,
    likelihood: str | Likelihood,
    *,
    epochs: int,
    structure: Any = "kron",
    groups: str = "layer",
    precision: Any = 1.0,
    start: int = 0,
    every_epochs: int = 1,
    steps: int = 100,
    rate: float = 0.1,
    fisher: Any = "auto",
    optimizer: Any = None,
    schedule: Any = None,
    schedule_every: str = "epoch",
    decay: str = "cosine",
    lr: float = 1e-3,
    lr_min: float = 1e-6,
    params: Any = "all",
    memory: str | float | None = None,
    batch_size: int = 128,
    n_data: int | None = None,
    clip: float | None = None,
    validation: Any = None,
    callback: Callable[..., Any] | None = None,
    checkpoint: Any = None,
    every: float = 60,
    inputs: Any = None,
    targets: Any = None,
    progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> Run:
    """Train a model in place, its prior and noise with it; `run.posterior` is the Laplace posterior of the best.

    Weights follow the gradient of the log joint density. From epoch `start` on, after every `every_epochs` epochs, one
    pass computes the curvature at the weights, and `steps` steps of Adam at `rate` climb the log evidence in the log
    precisions and, of a Gaussian whose noise is to be estimated, the log noise. Weights and hyperparameters of the
    highest evidence are kept. Immer, Bauer, Fortuin, Rätsch and Khan (2021).

    `groups`: one precision for each "layer", "tensor", "element", "normalised" group, or for all ("one"), starting at
    `precision`; or a prior of lw.prior(...) as `precision`. `structure` and `fisher` as in `lw.fit`: the evidence of
    Kronecker factors is the cheap one. The learning rate falls from `lr` to `lr_min` step by step, by `decay`
    ("cosine", "exponential" or "none"), unless there is a `schedule`. The other arguments are those of
    `lw.train.variational_laplace`. Batch normalisation is differentiated in eval mode, at its running statistics.
    """
    settings = Settings(**{**picked({**locals(), "multiplier": 1.0, "patience": None})})
    ascent = Ascent(_from(start), counted("every_epochs", every_epochs), counted("steps", steps), _rate(rate))
    words.structure(structure)
    given = {**locals(), "beta": 1.0}
    given["prior"] = _prior(unwrapped(model), precision, groups, data, params)
    with distributed.collective_call("train.marglik"), plain_tensors(), torch.enable_grad():
        loss, stream, draws = prepared("train.marglik", PenalisedLikelihood, given)
        loss.hold_noise()
        settings = _with_decay(settings, decay, lr_min, len(stream))

        def fitted() -> Posterior:
            return fit(
                model,
                stream.batches,
                loss.settled(),
                structure=structure,
                params=list(loss.layout.names),
                prior=loss.prior,
                fisher=fisher,
                memory=memory,
                inputs=inputs,
                targets=targets,
                progress=False,
            )

        climb = EvidenceAscent(loss, fitted, ascent)
        facts = {"structure": str(structure), "groups": groups, "every_epochs": every_epochs, "start": start}
        facts |= {"steps": steps, "rate": rate}
        history = Loop(loss, stream, settings, "marglik", bound_to("marglik", loss, facts), draws, climb).run()
        if climb.best is None:
            warn(
                f"train.marglik: the evidence was never looked at, since epoch start={start} with "
                f"every_epochs={every_epochs} does not come within {epochs} epochs. The prior is as it started."
            )
        climb.restore_best()
        posterior = fitted()
    return Run(model, history, lambda: posterior)


def _prior(model: nn.Module, precision: Any, groups: str, data: Any, params: Any) -> Any:
    if isinstance(precision, GaussianPrior):
        return precision
    with random_state_kept():
        return words.grouped_prior(model, precision, groups, 0.0, data if groups == "normalised" else None)


def _from(start: Any) -> int:
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise InputError(f"start: expected the number of an epoch, from 0 on, got {start!r}.")
    return start


def _rate(rate: Any) -> float:
    return float(positive_scale("rate", rate))


def _with_decay(settings: Settings, decay: str, lr_min: float, n_steps: int) -> Settings:
    """The learning rate from step to step, where the user has no schedule."""
    kinds: dict[str, Any] = {"cosine": _cosine, "exponential": _exponential, "none": None}
    kind = choose("decay", decay, kinds)
    if settings.schedule is not None or kind is None or not n_steps:
        return settings
    least = float(positive_scale("lr_min", lr_min))
    return settings.with_schedule(partial(kind, n=settings.epochs * n_steps, least=least), "step")


def _cosine(optimizer: Optimizer, n: int, least: float) -> LRScheduler:
    return CosineAnnealingLR(optimizer, n, least)


def _exponential(optimizer: Optimizer, n: int, least: float) -> LRScheduler:
    return ExponentialLR(optimizer, (least / optimizer.param_groups[0]["lr"]) ** (1 / n))
