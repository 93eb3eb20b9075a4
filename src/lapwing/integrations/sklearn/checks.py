"""What is wrong with an estimator's arguments, said before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import InputError, ShapeError

# argument: (smallest value, whether it may be that value, kind of number)
_NUMBERS: dict[str, tuple[float, bool, Any]] = {
    "epochs": (0, True, Integral),
    "patience": (0, True, Integral),
    "batch_size": (1, True, Integral),
    "learning_rate": (0, False, Real),
    "weight_decay": (0, True, Real),
    "validation_fraction": (0, True, Real),
}


def check_settings(settings: dict[str, Any]) -> None:
    for name, (least, included, kind) in _NUMBERS.items():
        value = settings[name]
        number = float(value) if isinstance(value, kind) and not isinstance(value, bool) else float("nan")
        if not (number > least or (included and number == least)):
            what = "a whole number" if kind is Integral else "a number"
            raise InputError(f"{name}: expected {what} {'from' if included else 'above'} {least:g}, got {value!r}.")
    if settings["validation_fraction"] >= 1:
        raise InputError(f"validation_fraction: a part of the rows, below 1; got {settings['validation_fraction']!r}.")
    if settings["tuning"] not in ("held_out", "evidence"):
        raise InputError(f"tuning: expected 'held_out' or 'evidence', got {settings['tuning']!r}.")
    hidden = settings["hidden"]
    if not isinstance(hidden, Sequence) or not all(isinstance(n, Integral) and int(n) > 0 for n in hidden):
        raise InputError(f"hidden: expected the widths of the layers, such as (50, 50), got {hidden!r}.")
    try:
        torch.device(settings["device"])
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"device: {settings['device']!r} is not one that torch knows, such as 'cpu' or 'cuda'."
        ) from error


@torch.no_grad()
def check_module(module: nn.Module, row: Tensor, n_outputs: int) -> None:
    """Raise unless the module gives (1, n_outputs) for one row, and has something to infer."""
    if not any(p.requires_grad for p in module.parameters()):
        raise InputError("module: it has no parameter that requires a gradient, so there is nothing to train or infer.")
    module.eval()
    try:
        f = module(row)
    except Exception as error:
        raise InputError(f"module: it does not accept rows of {row.shape[1]} features: {error}") from error
    if not isinstance(f, Tensor) or f.shape != (1, n_outputs):
        got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise ShapeError(
            f"module: for one row it should give the shape (1, {n_outputs}), with one output for each target or class; "
            f"it gives {got}. A function of (n_features, n_outputs) can make one that fits."
        )
