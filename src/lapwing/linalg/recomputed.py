"""What a backward pass computes again, in place of keeping it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.utils.checkpoint import checkpoint

from lapwing._types import Tensor

_here = threading.local()  # .inside: whether this thread runs such a function already


def recomputed(function: Callable[[], Tensor], *, attached: bool) -> Tensor:
    """function(); where it is attached to a graph, what it forms on the way is formed again on the way back.

    For contractions of rows: their products Σ_t g_t a_tᵀ are as many numbers as there are data, outputs and parameters.
    """
    if not attached or getattr(_here, "inside", False):
        return function()

    def run() -> Tensor:
        _here.inside = True
        try:
            return function()
        finally:
            _here.inside = False

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)
