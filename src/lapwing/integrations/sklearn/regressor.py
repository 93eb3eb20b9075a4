"""Regression with standard deviations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from lapwing.integrations.sklearn.estimator import Estimator
from lapwing.integrations.sklearn.network import Loss
from lapwing.integrations.sklearn.rows import Array, Rows, Scale, tensor
from lapwing.likelihoods import Gaussian, Likelihood


class LapwingRegressor(RegressorMixin, Estimator):
    """A network for tables whose predictions have error bars.

    Standardises inputs and targets inside. The default network is an MLP; some rows stop its training and tune the
    posterior's scale and noise. `module`: an `nn.Module` (a copy is trained on, with standardised inputs), a
    class or function of (n_features, n_outputs), or a skorch net. `tuning`: prior and noise by the rows that stop the
    training ("held_out"), or by the evidence of all rows ("evidence"). `epochs=0` keeps a module's weights as they are.
    `predict(X, return_std=True)` is as a Gaussian process has it: the standard deviation of a new target.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LapwingRegressor:
        X, y = validate_data(self, X, y, multi_output=True, y_numeric=True, dtype=np.float64, ensure_min_samples=2)
        y = np.asarray(y, dtype=np.float64)
        self.one_column_ = y.ndim == 1
        columns = y.reshape(len(y), -1)
        self._fit(X, columns, sample_weight, n_outputs=columns.shape[1], labels=False)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of the targets, and with `return_std` their standard deviation (noise included)."""
        inputs = self._inputs(X)
        p = self.posterior_.predict(inputs)
        mean = self._shaped(p.mean, self.target_scale_.std, self.target_scale_.mean)
        return (mean, self._shaped(p.std, self.target_scale_.std, 0.0)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[Array, Array]:
        """(low, high): the central interval that holds a new target with this probability."""
        inputs = self._inputs(X)
        low, high = self.posterior_.predict(inputs).interval(level)
        scale = self.target_scale_
        return self._shaped(low, scale.std, scale.mean), self._shaped(high, scale.std, scale.mean)

    @property
    def _likelihood(self) -> Likelihood:
        return Gaussian(per_output=not self.one_column_)

    @property
    def _loss(self) -> Loss:
        return lambda f, y: (f - y).square().mean(-1)

    def _prepare(self, train: Rows) -> None:
        self.target_scale_ = Scale.of(train.y, train.weight)

    def _targets(self, y: Array, dtype: torch.dtype) -> Tensor:
        return tensor(self.target_scale_.apply(y), dtype, self._at)

    def _shaped(self, v: Tensor, std: Array, mean: Any) -> Array:
        values = v.detach().cpu().double().numpy() * std + mean
        return values[:, 0] if self.one_column_ else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        tags.target_tags.single_output = True
        return tags
