"""A posterior for what a Hugging Face Trainer has trained, with its loaders, collator and label names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from lapwing.errors import InputError, InputTypeError
from lapwing.integrations import after_training
from lapwing.integrations.after_training import AfterTraining
from lapwing.integrations.transformers.chosen_logits import Answers, ChosenLogits, token_numbers
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Posterior


def fit(
    trainer: Any,
    likelihood: str | Likelihood | None = None,
    *,
    logits: Sequence[int] | None = None,
    tune: bool = True,
    tuning: dict[str, Any] | None = None,
    **options: Any,
) -> Posterior:
    """Fit on the trainer's training loader, tune on its evaluation loader: what `trainer.train()` left behind.

    `likelihood`: that of the model's own loss, unless given. `logits`: of a causal language model, the tokens that are
    the answers. Other arguments are those of `lw.fit`; `tuning` holds those of `lw.tune`. With PEFT the adapters are
    what is inferred, as they are what requires gradients.
    """
    if not hasattr(trainer, "get_train_dataloader"):
        raise InputTypeError(f"fit: expected a transformers.Trainer, got {type(trainer).__name__}.")
    evaluated = trainer.get_eval_dataloader() if trainer.eval_dataset is not None else None
    labels = _label_name(trainer.args, trainer.label_names)
    after = _after(trainer.model, likelihood, tune, tuning, {"targets": labels} if labels != "labels" else {}, options)
    model, train, held_out = _chosen(trainer.model, trainer.get_train_dataloader(), evaluated, logits, labels)
    return after.posterior(model, train, held_out)


class Lapwing(TrainerCallback):
    """The same as a callback: after training, `callback.posterior`, its scores in the log, its file in `output_dir`.

    The evaluation loader is the one that the trainer evaluated with; give `validation` where it does not evaluate.
    """

    def __init__(
        self,
        likelihood: str | Likelihood | None = None,
        *,
        logits: Sequence[int] | None = None,
        validation: Any = None,
        ood: Any = None,
        tune: bool = True,
        tuning: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.likelihood, self.logits, self.validation, self.ood = likelihood, logits, validation, ood
        self.tune, self.tuning, self.options = tune, tuning, options
        # Wrong arguments raise now, not after the training.
        AfterTraining(likelihood, tune, options, tuning or {})
        if logits is not None:
            token_numbers(logits)
        self.posterior: Posterior | None = None
        self.path: Path | None = None
        self.scores: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        AfterTraining(self.likelihood, self.tune, self.options, self.tuning or {}).check_model(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, train = kwargs["model"], kwargs.get("train_dataloader")
        labels = _label_name(args, None)
        named = {"targets": labels} if labels != "labels" else {}
        after = _after(model, self.likelihood, self.tune, self.tuning, named, self.options)
        held_out = self.validation if self.validation is not None else kwargs.get("eval_dataloader")
        network, train, held_out = _chosen(model, train, held_out, self.logits, labels)
        self.posterior = after.posterior(network, train, held_out)
        if held_out is not None:
            self.scores = after_training.scores(self.posterior, held_out, self.ood)
            state.log_history.append(
                {"step": state.global_step, **{f"lapwing_{name}": value for name, value in self.scores.items()}}
            )
        if state.is_world_process_zero:
            self.path = after_training.write(self.posterior, args.output_dir)


def load(folder: str | os.PathLike[str], model: nn.Module, *, logits: Sequence[int] | None = None) -> Posterior:
    """The posterior that was written beside the checkpoints; `model` holds the weights it was fitted at."""
    return after_training.find(folder, model if logits is None else ChosenLogits(model, logits))


def _after(
    model: nn.Module, likelihood: Any, tune: bool, tuning: dict[str, Any] | None, named: Any, options: Any
) -> AfterTraining:
    likelihood = _likelihood(model) if likelihood is None else likelihood
    return AfterTraining(likelihood, tune, {**named, **options}, tuning or {})


def _chosen(model: nn.Module, train: Any, held_out: Any, logits: Sequence[int] | None, labels: str) -> Any:
    if logits is None:
        return model, train, held_out
    ids = token_numbers(logits)
    data = (None if loader is None else Answers(loader, ids, labels) for loader in (train, held_out))
    return ChosenLogits(model, ids), *data


def _likelihood(model: nn.Module) -> str:
    """That of the loss which the model computes itself."""
    config = getattr(model, "config", None)
    kind = getattr(config, "problem_type", None)
    words = {"regression": "regression", "multi_label_classification": "multilabel"}
    if kind in words:
        return words[kind]
    if kind is None and getattr(config, "num_labels", None) == 1:
        return "regression"
    return "classification"


def _label_name(args: Any, found: Any) -> str:
    names = list(args.label_names or found or ["labels"])
    if len(names) != 1:
        raise InputError(f"The trainer has the label names {names}; a posterior takes one column of labels.")
    return names[0]
