"""A draw of the linearised function as a BoTorch model without uncertainty: what Thompson sampling maximises."""

from __future__ import annotations

from typing import Any

import torch
from botorch.models.deterministic import DeterministicModel
from torch import Tensor

from lapwing.posterior.views import FunctionDraws


class FunctionDraw(DeterministicModel):
    """One function: (…, q, d) → (…, q, m), differentiable in X, the same at every call."""

    def __init__(self, draw: FunctionDraws, input_transform: Any = None, outcome_transform: Any = None) -> None:
        super().__init__()
        self._draw = draw
        if input_transform is not None:
            self.input_transform = input_transform
        self._outcome = outcome_transform

    @property
    def num_outputs(self) -> int:
        return self._draw.posterior.linearised.k

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        rows = self.transform_inputs(X)
        f = self._draw(rows.reshape(-1, rows.shape[-1]))[0].to(X.dtype)
        f = f.reshape(*X.shape[:-1], self.num_outputs)
        return f if self._outcome is None else self._outcome.untransform(f)[0]
