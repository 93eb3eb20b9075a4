"""Results that come in pieces, as one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lapwing._types import Float, Tensor


def joined(pieces: Iterable[Float[Tensor, _ * rest]]) -> Float[Tensor, n * rest]:
    """The pieces one below the other; a single one is not copied."""
    first, *others = pieces
    return torch.cat([first, *others]) if others else first
