"""What both estimators share: parameters, training, the posterior, and pickling."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from lapwing.api.fit import fit
from lapwing.api.tune import tune
from lapwing.integrations.sklearn.checks import check_module, check_settings
from lapwing.integrations.sklearn.network import Loss, Training, make_module
from lapwing.integrations.sklearn.rows import Array, Rows, Scale, dtype_for, tensor
from lapwing.likelihoods import Likelihood
from lapwing.posterior import Posterior
from lapwing.storage import load, save

_FULL_BATCH = 1_024  # rows up to which an epoch is one step


class Estimator(BaseEstimator):
    """A network with a tuned posterior over its weights."""

    def __init__(
        self,
        module: Any = None,
        *,
        hidden: Sequence[int] = (50, 50),
        structure: Any = "auto",
        params: Any = "all",
        epochs: int = 400,
        patience: int = 60,
        learning_rate: float = 1e-2,
        batch_size: int = 128,
        weight_decay: float = 1e-4,
        validation_fraction: float = 0.15,
        tuning: str = "held_out",
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.module = module
        self.hidden = hidden
        self.structure = structure
        self.params = params
        self.epochs = epochs
        self.patience = patience
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.weight_decay = weight_decay
        self.validation_fraction = validation_fraction
        self.tuning = tuning
        self.device = device
        self.random_state = random_state

    # --- what differs ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _likelihood(self) -> str | Likelihood: ...

    @property
    @abstractmethod
    def _loss(self) -> Loss: ...

    @abstractmethod
    def _targets(self, y: Array, dtype: torch.dtype) -> Tensor: ...

    # --- fitting -------------------------------------------------------------------------------------

    def _fit(self, X: Array, y: Array, sample_weight: Any, *, n_outputs: int, labels: bool) -> None:
        check_settings(self.get_params(deep=False))
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        rows = Rows.distinct(X, y, weight)
        random = check_random_state(self.random_state)
        train, held_out = rows.held_out(self.validation_fraction, random, labels)
        self.scale_ = Scale.of(train.X, train.weight)
        dtype, seed = dtype_for(len(rows)), int(random.randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module_ = make_module(self.module, X.shape[1], n_outputs, self.hidden).to(self._at, dtype)
            check_module(self.module_, self._rows(train, dtype)[:1], n_outputs)
            self._prepare(train)
            whole = len(train) <= _FULL_BATCH
            training = Training(
                self.epochs,
                self.patience,
                self.learning_rate if whole else self.learning_rate / 4,
                len(train) if whole else self.batch_size,
                self.weight_decay,
                seed,
            )
            parts = [None if part is None else self._tensors(part, dtype) for part in (train, held_out)]
            assert parts[0] is not None
            self.n_epochs_ = training(self.module_, self._loss, parts[0], parts[1])
        self.posterior_ = self._posterior(train, held_out, dtype)

    def _prepare(self, train: Rows) -> None:
        """What is read off the training rows besides the scale of the inputs."""

    def _posterior(self, train: Rows, held_out: Rows | None, dtype: torch.dtype) -> Posterior:
        """Tuned by the rows that stopped the training, or by the evidence of all rows."""
        judges = held_out if self.tuning == "held_out" else None
        seen = train if judges is held_out or held_out is None else train.joined(held_out)
        repeated, scale = seen.repeated()
        x, y, _ = self._tensors(repeated, dtype)
        options: dict[str, Any] = {"structure": self.structure, "params": self.params, "progress": False}
        posterior = fit(self.module_, (x, y), self._likelihood, likelihood_scale=scale, **options)
        if judges is None:
            return tune(posterior, (x, y), progress=False)
        return tune(posterior, (x, y), validation=self._tensors(judges.repeated()[0], dtype)[:2], progress=False)

    def _tensors(self, rows: Rows, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self._rows(rows, dtype), self._targets(rows.y, dtype), tensor(rows.weight, dtype, self._at)

    def _rows(self, rows: Rows, dtype: torch.dtype) -> Tensor:
        return tensor(self.scale_.apply(rows.X), dtype, self._at)

    @property
    def _at(self) -> torch.device:
        return torch.device(self.device)

    # --- asking --------------------------------------------------------------------------------------

    def _inputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return tensor(self.scale_.apply(X), next(_parameters(self.module_)).dtype, self._at)

    # --- copies --------------------------------------------------------------------------------------

    def __getstate__(self) -> Any:
        """The posterior goes as its file, which holds no training data."""
        state = super().__getstate__()
        return {**state, "posterior_": _bytes(state["posterior_"])} if "posterior_" in state else state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if isinstance(self.__dict__.get("posterior_"), bytes):
            self.posterior_ = _posterior(self.__dict__["posterior_"], self.module_)


def _parameters(module: nn.Module) -> Any:
    return module.parameters()


def _bytes(posterior: Posterior) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(posterior, Path(folder) / "posterior")
        return (Path(folder) / "posterior").read_bytes()


def _posterior(content: bytes, module: nn.Module) -> Posterior:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "posterior").write_bytes(content)
        return load(Path(folder) / "posterior", module)
