"""Serialisation of Python objects between ranks by pickle.

Pickle writes the whole storage behind a tensor; here a view is written as its own entries only. Ranks of one job trust
each other: files that users load never go through pickle.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def packed(value: Any) -> Tensor:
    """The pickled object as a uint8 tensor on the CPU."""
    buffer = io.BytesIO()
    _Packer(buffer, protocol=5).dump(value)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(flat: Tensor) -> Any:
    return pickle.loads(flat.cpu().numpy().tobytes())


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (flat.numpy().tobytes(), value.dtype, tuple(value.shape), value.device.type)


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape).to(device)
