"""Concatenation of results that are computed in pieces."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lapwing._types import Float, Tensor


def joined(pieces: Iterable[Float[Tensor, _ * rest]]) -> Float[Tensor, n * rest]:
    """`torch.cat` along the first axis; a single piece is returned without a copy."""
    first, *others = pieces
    return torch.cat([first, *others]) if others else first
