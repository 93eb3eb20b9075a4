"""Activation checkpointing of contractions: intermediate results are recomputed in the backward pass, not stored."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.utils.checkpoint import checkpoint

from lapwing._types import Tensor

_KEPT_FLOATS = 1 << 25  # of a dense form that is kept for the backward pass instead
_local = threading.local()  # .inside: whether this thread is inside a checkpointed function


def recomputed(function: Callable[[], Tensor], *, attached: bool, floats: int) -> Tensor:
    """function(), under `torch.utils.checkpoint` if its result is differentiable (`attached`).

    For contractions of Jacobian rows, whose dense form Σ_t g_t a_tᵀ has (data · outputs · parameters) entries.
    """
    few = floats <= _KEPT_FLOATS
    if not attached or few or getattr(_local, "inside", False):  # nested checkpoints would recompute several times
        return function()

    def run() -> Tensor:
        _local.inside = True
        try:
            return function()
        finally:
            _local.inside = False

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)
