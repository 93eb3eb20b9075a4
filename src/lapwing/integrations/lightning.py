"""A Lightning callback that gives the trained module a posterior."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from lapwing.errors import InputError
from lapwing.integrations import after_training
from lapwing.integrations.after_training import AfterTraining
from lapwing.integrations.extras import needed
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Posterior

pl: Any = needed("lightning.pytorch", extra="lightning")


class Lapwing(pl.Callback):
    """After `trainer.fit`: fit on the training loader, tune on the validation loader, score, write beside checkpoints.

    `module`: the attribute of the LightningModule that is the network ("model.backbone"), if it is not what its
    `forward` computes. `ood`: data that are unlike the training data, for the score that tells them apart. All other
    arguments are those of `lw.fit`; `tuning` holds those of `lw.tune`, and `tune=False` leaves the prior as given.
    """

    def __init__(
        self,
        likelihood: str | Likelihood,
        *,
        module: str | None = None,
        tune: bool = True,
        tuning: dict[str, Any] | None = None,
        ood: Any = None,
        dirpath: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.after = AfterTraining(likelihood, tune, options, tuning or {})
        self.module, self.ood, self.dirpath = module, ood, dirpath
        self.posterior: Posterior | None = None
        self.path: Path | None = None
        self.scores: dict[str, float] = {}

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.after.check_model(self._network(pl_module))

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        if trainer.fast_dev_run or trainer.interrupted:
            return
        train, validation = _one(trainer.train_dataloader, "training"), _one(trainer.val_dataloaders, "validation")
        self.posterior = self.after.posterior(self._network(pl_module), train, validation)
        if validation is not None:
            self.scores = after_training.scores(self.posterior, validation, self.ood)
            self._log(trainer)
        if trainer.is_global_zero:
            self.path = after_training.write(self.posterior, self.dirpath or _folder(trainer))

    def _network(self, pl_module: nn.Module) -> nn.Module:
        try:
            return pl_module if self.module is None else pl_module.get_submodule(self.module)
        except AttributeError as error:
            raise InputError(
                f"Lapwing(module={self.module!r}): {type(pl_module).__name__} has no such module; it has "
                f"{', '.join(name for name, _ in pl_module.named_children())}."
            ) from error

    def _log(self, trainer: Any) -> None:
        named = {f"lapwing/{name}": value for name, value in self.scores.items()}
        trainer.callback_metrics.update(named)
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)


def load(folder: str | os.PathLike[str], model: nn.Module) -> Posterior:
    """The posterior that was written beside the checkpoints; `model` holds the weights it was fitted at."""
    return after_training.find(folder, model)


def _one(loaders: Any, what: str) -> Any:
    """The loader; of several validation loaders the first."""
    if isinstance(loaders, list | tuple):
        if what == "training" and len(loaders) > 1:
            raise InputError(f"Lapwing: the trainer has {len(loaders)} training loaders; a posterior is fitted on one.")
        return loaders[0] if loaders else None
    return loaders


def _folder(trainer: Any) -> Path:
    checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(checkpoints or trainer.default_root_dir)
