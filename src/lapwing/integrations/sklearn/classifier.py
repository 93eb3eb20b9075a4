"""Classification with calibrated probabilities, and how much of the doubt is the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor
from torch.nn.functional import cross_entropy

from lapwing.integrations.sklearn.estimator import Estimator
from lapwing.integrations.sklearn.network import Loss
from lapwing.integrations.sklearn.rows import Array
from lapwing.likelihoods import Categorical, Likelihood
from lapwing.predictive import ClassPrediction


class LapwingClassifier(ClassifierMixin, Estimator):
    """A network for tables whose probabilities know what it has not seen.

    Labels may be strings or numbers. As `LapwingRegressor`, with `class_weight` (a mapping, "balanced" or None).
    """

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
        class_weight: Any = None,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        super().__init__(
            module,
            hidden=hidden,
            structure=structure,
            params=params,
            epochs=epochs,
            patience=patience,
            learning_rate=learning_rate,
            batch_size=batch_size,
            weight_decay=weight_decay,
            validation_fraction=validation_fraction,
            tuning=tuning,
            device=device,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LapwingClassifier:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"LapwingClassifier needs samples of 2 classes or more; y holds one class, {self.classes_}."
            )
        self._weights = self._class_weights(y)
        self._fit(X, numbers.astype(np.float64), sample_weight, n_outputs=len(self.classes_), labels=True)
        return self

    def predict(self, X: Any) -> Any:
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]

    def predict_proba(self, X: Any) -> Array:
        return _array(self._predicted(X).probs)

    def predict_log_proba(self, X: Any) -> Array:
        return _array(self._predicted(X).log_probs)

    def decision_function(self, X: Any) -> Array:
        """Log probabilities; of two classes the log odds of the second."""
        log_probs = self.predict_log_proba(X)
        return log_probs[:, 1] - log_probs[:, 0] if len(self.classes_) == 2 else log_probs

    def epistemic(self, X: Any) -> Array:
        """The mutual information of label and weights, in nats: doubt that more data would remove."""
        return _array(self._predicted(X).epistemic)

    def _predicted(self, X: Any) -> ClassPrediction:
        inputs = self._inputs(X)
        p = self.posterior_.predict(inputs)
        assert isinstance(p, ClassPrediction)
        return p

    def _class_weights(self, y: Any) -> Array | None:
        if self.class_weight is None:
            return None
        return compute_class_weight(self.class_weight, classes=self.classes_, y=y)

    @property
    def _likelihood(self) -> Likelihood:
        return Categorical(weight=None if self._weights is None else self._weights.tolist())

    @property
    def _loss(self) -> Loss:
        weight = None if self._weights is None else torch.as_tensor(self._weights)
        return lambda f, y: cross_entropy(f, y, weight=None if weight is None else weight.to(f), reduction="none")

    def _targets(self, y: Array, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(y.astype(np.int64), device=self._at)


def _array(v: Tensor) -> Array:
    values: Array = v.detach().cpu().double().numpy()
    return values
